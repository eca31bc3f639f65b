"""Text to token ids, such that no text of a client ever becomes a control token of the model."""

import json
import re
import secrets
import sys
from collections.abc import Iterable
from typing import Any

import tokenizers

_PRIVATE = range(0xE000, 0xF900)
_PLANE_15 = 0xF0000


class TokenizerRefusedError(Exception):
    """The tokenizer cannot be served, and why."""


class ControlTextError(Exception):
    """A text comes to a control token, and this tokenizer knows no other way to encode it."""


class ModelTokenizer:
    """Encodes prompts and rendered conversations for one model. Thread safe: nothing in it changes after construction.

    In a conversation the template's special tokens are wanted and a user's are not, but once rendered both are the
    same text. So the encoder knows each special token by a random name instead of its text. ``shield`` takes special
    tokens out of what users say, before it is rendered; what then reads as one in the rendered text is the template's
    and gets its name; and text that stands in no name's place is only ever text. Names are private-use characters
    chosen at random for each instance, so that no client can write one.

    Encoding the pieces between special tokens one by one was rejected: some tokenizers treat the beginning of a text
    specially, and the ids would differ from those that the model was trained on.
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        """Load a ``tokenizer.json``; raises TokenizerRefusedError where it is none."""
        try:
            document = json.loads(tokenizer_json)
            # Left in, these would cut a long prompt without a word, or pad a short one.
            document["truncation"] = document["padding"] = None
            self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(document))
            added = [(entry["id"], entry["content"], entry["special"]) for entry in document["added_tokens"]]
        except Exception as error:  # the library raises bare Exception for whatever it cannot read
            raise TokenizerRefusedError(f"tokenizer: cannot be read: {error}") from error
        self.document: dict[str, Any] = document
        self.special_ids = frozenset(token_id for token_id, _, special in added if special)
        self._texts = [text for _, text, special in added if special and text]
        self._index = {text: index for index, text in enumerate(self._texts)}
        self._special = re.compile(_any_of(self._texts) or r"(?!)")
        self._name, self._shield = _random_word(), _random_word()
        self._shielded = re.compile(f"{self._shield}([{chr(_PLANE_15)}-{chr(sys.maxunicode)}])")
        self._encoder = tokenizers.Tokenizer.from_str(json.dumps(self._renamed()))
        self._ids = self._restored_ids(added)
        self._reachable = self._reachable_control_ids()

    def shield(self, text: str) -> str:
        """Replace the special tokens in a client's text by what ``encode_rendered`` turns back into plain text."""
        return self._special.sub(lambda match: self._shield + self._mark(match[0]), text)

    def unshield(self, text: str) -> str:
        """Put back what ``shield`` replaced."""
        return self._shielded.sub(lambda match: self._texts[ord(match[1]) - _PLANE_15], text)

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a raw prompt, with what the tokenizer by itself puts before and after a text, such as a BOS.

        Raises ControlTextError.
        """
        encoding = self._encoder.encode(text)
        ids = encoding.ids
        if not self._reachable.isdisjoint(ids):
            added = encoding.special_tokens_mask
            self._refuse_control(token_id for token_id, mask in zip(ids, added, strict=True) if not mask)
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """Encode a conversation rendered from shielded messages; all of its special tokens come from the template.

        Raises ControlTextError.
        """
        named = self._special.sub(lambda match: self._name + self._mark(match[0]), text)
        ids = self._encoder.encode(self.unshield(named), add_special_tokens=False).ids
        self._refuse_control(ids)
        restored = self._ids
        return [restored.get(token_id, token_id) for token_id in ids] if restored else ids

    def _mark(self, special: str) -> str:
        return chr(_PLANE_15 + self._index[special])

    def _renamed(self) -> dict[str, Any]:
        entries = [dict(entry) for entry in self.document["added_tokens"]]
        for entry in entries:
            if entry["special"] and entry["content"]:
                # A name is matched as it stands and wherever it stands, before any normalizer can change it.
                name = self._name + self._mark(entry["content"])
                entry |= {"content": name, "normalized": False, "single_word": False}
        return {**self.document, "added_tokens": entries}

    def _restored_ids(self, added: Iterable[tuple[int, str, bool]]) -> dict[int, int]:
        """Map the encoder's ids of added tokens to the model's, where the new names changed them."""
        restored = {}
        for token_id, text, special in added:
            name = self._name + self._mark(text) if special and text else text
            encoder_id = self._encoder.token_to_id(name)
            if encoder_id is not None and encoder_id != token_id:
                restored[encoder_id] = token_id
        return restored

    def _reachable_control_ids(self) -> frozenset[int]:
        """Find the special tokens that plain text might come to, as they are entries of the model's own vocabulary."""
        ids = {self._encoder.token_to_id(text) for text in self._texts} - {None}
        model = self.document["model"]
        unknown = model.get("unk_id"), self._encoder.token_to_id(model.get("unk_token") or "")
        return frozenset(token_id for token_id in ids if token_id is not None and token_id not in unknown)

    def _refuse_control(self, ids: Iterable[int]) -> None:
        if not self._reachable.isdisjoint(ids):
            raise ControlTextError("holds the text of a special token that this tokenizer cannot encode as text")


def _random_word() -> str:
    """Make a word of private-use characters: no normalizer, case change or tokenizer of ours touches them."""
    return "".join(chr(secrets.choice(_PRIVATE)) for _ in range(10))


def _any_of(words: Iterable[str]) -> str:
    """Write a regular expression for the longest of some words.

    As a trie: an alternation of a thousand reserved tokens would try all of them at each "<" of a hostile text.
    """
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _expression(trie)


def _expression(node: dict[str, Any]) -> str:
    branches = [re.escape(character) + _expression(child) for character, child in node.items() if character]
    if not branches:
        return ""
    body = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return body + ("?" if "" in node else "")
