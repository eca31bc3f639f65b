"""The model behind a worker: its description, checked, and the means to turn text into its ids and back."""

from dataclasses import dataclass

from prefixgate.cache.hashing import CacheScope
from prefixgate.gateway.chat_template import ChatTemplate, TemplateRefusedError
from prefixgate.gateway.detokenizer import TokenPieces
from prefixgate.gateway.tokenizer import ModelTokenizer, TokenizerRefusedError
from prefixgate.proto import worker_pb2
from prefixgate.proto.transport import PROTOCOL_VERSION, text_digest


class WorkerRefusedError(Exception):
    """This gateway cannot work with that worker; the text names what differs."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What one worker serves, for one life of it."""

    description: worker_pb2.ModelDescription
    tokenizer: ModelTokenizer
    pieces: TokenPieces
    chat_template: ChatTemplate | None
    """None where the model has none."""

    def is_alike(self, other: "ServedModel") -> bool:
        """Whether ids and limits of one are those of the other."""
        mine, theirs = self.description, other.description
        return (mine.model, mine.fingerprint, mine.text_digest) == (
            theirs.model,
            theirs.fingerprint,
            theirs.text_digest,
        )

    def scope(self, tenant: str, salt: str) -> CacheScope:
        """Tell with whom a call shares: as its worker does, so that both name blocks alike."""
        return CacheScope(tenant, f"{self.description.model}@{self.description.fingerprint}", salt=salt)


def check_description(description: worker_pb2.ModelDescription, hash_key_fingerprint: bytes) -> None:
    """Check that gateway and worker agree. Raises WorkerRefusedError with the names of all that differs."""
    faults = []
    if description.protocol_version != PROTOCOL_VERSION:
        faults.append(f"protocol_version is {description.protocol_version}, this gateway's is {PROTOCOL_VERSION}")
    if description.hash_key_fingerprint != hash_key_fingerprint:
        faults.append(
            f"hash_key_fingerprint is {description.hash_key_fingerprint.hex()}, this gateway's is "
            f"{hash_key_fingerprint.hex()}: set cache.hash_key_file of both to the same secret"
        )
    if description.text_digest != text_digest(description.tokenizer, description.chat_template):
        faults.append("text_digest is not that of the tokenizer and the chat template sent with it")
    faults += [
        f"{name} is not set"
        for name in ("model", "incarnation", "vocabulary_size", "context_length", "max_call_tokens")
        if not getattr(description, name)
    ]
    if faults:
        raise WorkerRefusedError("; ".join(faults))


def load_model(description: worker_pb2.ModelDescription, previous: ServedModel | None = None) -> ServedModel:
    """Load tokenizer and template, or take them from ``previous`` where they are the same.

    Takes seconds for a big vocabulary, so not for the event loop. Raises WorkerRefusedError.
    """
    if previous is not None and _text_of(previous.description) == _text_of(description):
        return ServedModel(description, previous.tokenizer, previous.pieces, previous.chat_template)
    try:
        tokenizer = ModelTokenizer(description.tokenizer)
        pieces = TokenPieces(tokenizer)
        source = description.chat_template
        chat_template = ChatTemplate(source, description.template_tokens) if source else None
    except (TokenizerRefusedError, TemplateRefusedError) as error:
        raise WorkerRefusedError(str(error)) from error
    return ServedModel(description, tokenizer, pieces, chat_template)


def _text_of(description: worker_pb2.ModelDescription) -> tuple[bytes, dict[str, str]]:
    return description.text_digest, dict(description.template_tokens)
