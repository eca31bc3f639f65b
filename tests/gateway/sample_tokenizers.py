"""Small tokenizers of the families that causal language models use, built on the spot."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = ["the quick brown fox jumps over the lazy dog", "Hello, world! How are you? ", "ďábelské 👋🏽 삼겹살 你好"]


def _specials() -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in SPECIALS]


def byte_level(*, bos: bool = False) -> bytes:
    """GPT-2's family: bytes, and merges of them that may cut a character in two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: token_id for token_id, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for text in [*_CORPUS, "the", " the", "👋👋"]:
        # Merged from the left and three bytes at a time, without regard to where a character ends.
        pieces = [piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)]
        for piece in pieces:
            for start in range(0, len(piece) - 2, 3):
                for pair in ((piece[start], piece[start + 1]), (piece[start : start + 2], piece[start + 2])):
                    if "".join(pair) not in vocabulary:
                        vocabulary["".join(pair)] = len(vocabulary)
                        merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_specials())
    tokenizer.add_tokens(["<tool call>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return tokenizer.to_str().encode()


def byte_fallback() -> bytes:
    """Llama 2's family: words that begin with ▁, bytes for what has no token, a decoder that strips a first space."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for character in "▁abcdefghijklmnopqrstuvwxyzHW,.!?<|_>/":
        vocabulary[character] = len(vocabulary)
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("▁", "▁"), ("o", "w"), ("ow", "n")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True, normalized=False), *_specials()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str().encode()


def metaspace() -> bytes:
    """SentencePiece's newer form: the space before a first word is added by the pre-tokenizer."""
    words = ["<unk>", *SPECIALS, *"▁abcdefghijklmnopqrstuvwxyz", "▁the", "▁fox", "own", "你", "好"]
    vocabulary = [(word, 0.0 if index < 5 else -float(index)) for index, word in enumerate(words)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(_specials())
    return tokenizer.to_str().encode()


def with_limits(tokenizer_json: bytes) -> bytes:
    """The same tokenizer as a training run may have left it: with truncation and padding switched on."""
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    return tokenizer.to_str().encode()


def with_decoder(tokenizer_json: bytes, decoder: dict[str, object]) -> bytes:
    return json.dumps({**json.loads(tokenizer_json), "decoder": decoder}).encode()


FAMILIES = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id
