"""On which terms a client calls: who it is, how long it waits, and how often it tries."""

from prefixgate.gateway.client.attempts import Attempts, RetryPolicy
from prefixgate.gateway.client.trace_context import trace_metadata
from prefixgate.proto.transport import CHANNEL_OPTIONS

DEFAULT_ADDRESS = "127.0.0.1:8050"
"""Where `prefixgate serve` listens by default."""

# A gateway that restarts is found again within the waits between attempts; gRPC's own patience begins with a second,
# and until it tries again every call fails at once.
_RECONNECT_MS = {"initial": 100, "min": 100, "max": 5000}
CLIENT_CHANNEL_OPTIONS = (
    *CHANNEL_OPTIONS,
    *((f"grpc.{name}_reconnect_backoff_ms", milliseconds) for name, milliseconds in _RECONNECT_MS.items()),
)
"""For the channels of both clients."""


class Terms:
    """What all calls of one client have in common."""

    def __init__(self, api_key: str, timeout: float | None, retry: RetryPolicy) -> None:
        """Raises ValueError for a key that cannot be sent, without repeating it as gRPC would."""
        if not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("the API key holds characters that no API key has")
        self._credential: tuple[tuple[str, str], ...] = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._timeout = timeout
        self._retry = retry

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes along with the call that is about to be made."""
        return (*self._credential, *trace_metadata())

    def attempts(self, timeout: float | None) -> Attempts:
        """Begin a call, with its own timeout or the client's."""
        return Attempts(self._retry, self._timeout if timeout is None else timeout)
