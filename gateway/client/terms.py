"""On which terms a client calls: who it is, how long it waits, and how often it tries."""

from prefixgate.gateway.client.attempts import Attempts, RetryPolicy

DEFAULT_ADDRESS = "127.0.0.1:8050"
"""Where `prefixgate serve` listens by default."""


class Terms:
    """What all calls of one client have in common."""

    def __init__(self, api_key: str, timeout: float | None, retry: RetryPolicy) -> None:
        """Raises ValueError for a key that cannot be sent, without repeating it as gRPC would."""
        if not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("the API key holds characters that no API key has")
        self.metadata: tuple[tuple[str, str], ...] = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._timeout = timeout
        self._retry = retry

    def attempts(self, timeout: float | None) -> Attempts:
        """Begin a call, with its own timeout or the client's."""
        return Attempts(self._retry, self._timeout if timeout is None else timeout)
