"""Settings that are each allowed and make no sense together."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the settings import this module
    from prefixgate.config.settings import Settings


def contradictions(settings: "Settings") -> Iterator[str]:
    """Say what does not go together, each as a message that names the keys."""
    cache, gateway, worker = settings.cache, settings.gateway, settings.worker
    if cache.memory is not None and cache.blocks is not None:
        yield f"cache.memory and cache.blocks ({cache.blocks}): only one of both sets the pool's size"
    if cache.memory_share is not None and not (cache.memory is None and cache.blocks is None):
        other = "memory" if cache.blocks is None else "blocks"
        yield f"cache.memory_share ({cache.memory_share}) and cache.{other}: only one of both sets the pool's size"
    if cache.hash_key and cache.hash_key_file:
        yield "cache.hash_key and cache.hash_key_file: only one of both names the key"
    if settings.limits.max_prompt_bytes is not None and settings.limits.max_prompt_bytes > gateway.max_message_bytes:
        yield (
            f"limits.max_prompt_bytes ({settings.limits.max_prompt_bytes}) is more than gateway.max_message_bytes "
            f"({gateway.max_message_bytes}), in which a prompt must come"
        )
    yield from _incomplete_tls("gateway.tls", gateway.tls_cert, gateway.tls_key, gateway.tls_client_ca)
    yield from _incomplete_tls("worker.tls", worker.tls_cert, worker.tls_key, worker.tls_client_ca)
    yield from _half_a_pair("gateway.worker_client", gateway.worker_client_cert, gateway.worker_client_key)
    if gateway.worker_client_cert and not gateway.worker_ca:
        yield "gateway.worker_client_cert: needs gateway.worker_ca, without which there is no TLS"


def _incomplete_tls(prefix: str, certificate: str, key: str, client_ca: str) -> Iterator[str]:
    yield from _half_a_pair(prefix, certificate, key)
    if client_ca and not certificate:
        yield f"{prefix}_client_ca: needs {prefix}_cert, without which there is no TLS"


def _half_a_pair(prefix: str, certificate: str, key: str) -> Iterator[str]:
    if bool(certificate) != bool(key):
        missing, given = ("key", "cert") if certificate else ("cert", "key")
        yield f"{prefix}_{missing}: is not set, but {prefix}_{given} is; both belong together"
