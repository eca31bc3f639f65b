"""The witness model's text: one token for each byte, a few special tokens and a ChatML template."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from prefixgate.worker.model_runner import TextAssets

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Their ids follow the 256 byte tokens, in this order."""

VOCABULARY_SIZE = 256 + len(SPECIAL_TOKENS)
EOS_ID = 256 + SPECIAL_TOKENS.index("<|im_end|>")
EOS_IDS = (EOS_ID, 256 + SPECIAL_TOKENS.index("<|endoftext|>"))

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def witness_text() -> TextAssets:
    """Build the tokenizer: the id of a byte's token is the byte, so any text and any bytes go there and back."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    return TextAssets(
        tokenizer=tokenizer.to_str().encode(),
        chat_template=CHAT_TEMPLATE,
        template_tokens={"eos_token": SPECIAL_TOKENS[EOS_ID - 256]},
    )


def _byte_alphabet() -> list[str]:
    """Return the character by which the ``tokenizers`` library's byte level writes each byte.

    It is GPT-2's: printable Latin-1 bytes stand for themselves, the others for the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    code_points, following = [], 256
    for byte in range(256):
        if byte in printable:
            code_points.append(byte)
        else:
            code_points.append(following)
            following += 1
    return [chr(code_point) for code_point in code_points]
