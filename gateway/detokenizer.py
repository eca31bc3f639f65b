"""Token ids to text as they come: append-only, in whole characters, and the same however the ids are cut into messages.

Decoding a growing list of ids again and again, and sending what is new, breaks in ways that depend on the tokenizer:
the decoder strips a space at the beginning of each piece, a character cut in two becomes U+FFFD and then something
else, and one stray byte turns a whole run of good ones into U+FFFD. So here a token is *bytes*, which depend on nothing
but whether it is an output's first token; text is those bytes read as UTF-8, where an unfinished character waits for
its rest. For ids that decode to valid UTF-8 the text is what the tokenizer's own decoder gives for all of them at once.
"""

import codecs
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from prefixgate.gateway.tokenizer import ModelTokenizer, TokenizerRefusedError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTEXTUAL_DECODERS = frozenset({"BPEDecoder", "CTC"})
"""What a token comes to there depends on the tokens after it."""
_SPACE = b" "


class TokenPieces:
    """The bytes of each token of a model. Shared by all outputs; used from one thread."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        """Raises TokenizerRefusedError for a decoder under which a token has no bytes of its own."""
        self._tokenizer = tokenizer.tokenizer
        self._special_ids = tokenizer.special_ids
        kinds = set(_decoder_kinds(tokenizer.document.get("decoder")))
        if not kinds.isdisjoint(_CONTEXTUAL_DECODERS) or ("ByteLevel" in kinds and not kinds <= {"ByteLevel", "Fuse"}):
            raise TokenizerRefusedError(f"tokenizer: the decoder {'+'.join(sorted(kinds))} is not served")
        self._byte_of = _byte_level_alphabet() if "ByteLevel" in kinds else None
        self._has_byte_tokens = "ByteFallback" in kinds
        self._anchor = -1 if self._byte_of else _find_anchor(self._tokenizer)
        # At most one entry for each id of the vocabulary.
        self._pieces: dict[int, bytes | None] = {}

    def piece(self, token_id: int) -> bytes | None:
        """Return the bytes of a token where it follows another.

        None for a token that is no text: a special one, or a padding row beyond the tokenizer's last id.
        """
        try:
            return self._pieces[token_id]
        except KeyError:
            piece = self._pieces[token_id] = self._compute(token_id)
            return piece

    def first_piece(self, token_id: int) -> bytes | None:
        """Return the bytes of a token where it is an output's first: some decoders strip a space there."""
        piece = self.piece(token_id)
        if piece is None or self._byte_of is not None:
            return piece
        alone = self._tokenizer.decode([token_id])
        if self._byte_token(token_id) is None:
            return alone.encode()
        return b"" if piece == _SPACE and not alone else piece

    def _compute(self, token_id: int) -> bytes | None:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return None
        if self._byte_of is not None:
            return _from_alphabet(token, self._byte_of)
        byte = self._byte_token(token_id)
        if byte is not None:
            return byte
        before = self._tokenizer.decode([self._anchor])
        return self._tokenizer.decode([self._anchor, token_id])[len(before) :].encode()

    def _byte_token(self, token_id: int) -> bytes | None:
        match = _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "") if self._has_byte_tokens else None
        return bytes.fromhex(match[1]) if match else None


class Detokenizer:
    """One output's text so far."""

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_first = True

    def push(self, token_id: int) -> str:
        """Take the next id and return the characters that it completes, if any.

        Special ids, and ids that the tokenizer does not have, come to nothing.
        """
        piece = self._pieces.first_piece(token_id) if self._is_first else self._pieces.piece(token_id)
        if piece is None:
            return ""
        self._is_first = False
        return self._characters.decode(piece)

    def flush(self) -> str:
        """End the output: return U+FFFD for a character that is still unfinished, else nothing."""
        return self._characters.decode(b"", final=True)


def _decoder_kinds(config: Mapping[str, Any] | None) -> Iterator[str]:
    if config is None:
        return
    if config["type"] == "Sequence":
        for part in config["decoders"]:
            yield from _decoder_kinds(part)
    else:
        yield config["type"]


def _find_anchor(tokenizer: tokenizers.Tokenizer) -> int:
    """Find a token of plain text, after which any other token shows what it comes to inside a text."""
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id])
        if text.isascii() and text.isalnum():
            return token_id
    raise TokenizerRefusedError("tokenizer: no token of its vocabulary is a plain word")


def _byte_level_alphabet() -> dict[str, int]:
    """Map the characters by which byte-level tokenizers write bytes.

    GPT-2's: printable Latin-1 bytes are themselves, and the others are the code points from 256 on in their order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _from_alphabet(token: str, byte_of: Mapping[str, int]) -> bytes:
    try:
        return bytes([byte_of[character] for character in token])
    except KeyError:
        # An added token is written as it reads.
        return token.encode()
