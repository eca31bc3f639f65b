"""What both ends of a hop must agree on beside the messages: channel options, the protocol's version, digests."""

import hashlib

PROTOCOL_VERSION = 1
"""Raised when gateway and worker of different versions could misread each other."""

REQUEST_ID_KEY = "prefixgate-request-id"
"""Trailing metadata of a call that failed: its name in the gateway's log."""

STATUS_DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata with a google.rpc.Status: the fields that were refused, or when to try again."""

MAX_MESSAGE_BYTES = 64 << 20
"""Both hops and both ways. One limit, so that what the first hop takes never fails on the second; gRPC's own default
of 4 MiB is less than one long prompt's token ids."""

_KEEPALIVE_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 10_000
_SHARED: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A status message travels as metadata; the default of 8 KiB would turn a long one into a transport error.
    ("grpc.max_metadata_size", 64 << 10),
    # Pings on both sides find a peer whose TCP connection died without a word, so that its calls end.
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    # What gRPC really waits for a ping's answer; a minute by default, whatever the line above says.
    ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS = _SHARED
"""For every client channel."""

IN_THE_CLEAR: tuple[tuple[str, int], ...] = (("grpc.enable_http_proxy", 0),)
"""For every client channel without TLS besides. gRPC sends what it carries through the proxy that the environment
names, on whatever machine that is, and also where the server is on this one."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SHARED,
    # By default a second server on a used port starts without an error and takes part of the calls.
    ("grpc.so_reuseport", 0),
    # By default a server answers a client's pings during a long silence with GOAWAY too_many_pings.
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
)
"""For every server."""


MAX_STREAMS = 1024
"""Calls at the same time on one connection of a client, who is no part of the system; others wait at the client."""


def client_facing(max_message_bytes: int) -> tuple[tuple[str, int], ...]:
    """Make the options of a server that clients call, of whom no message may be longer than that."""
    own = {"grpc.max_receive_message_length": max_message_bytes, "grpc.max_concurrent_streams": MAX_STREAMS}
    return tuple({**dict(SERVER_OPTIONS), **own}.items())


def text_digest(tokenizer: bytes, chat_template: str) -> bytes:
    """Digest the text assets of a model: SHA-256 over both, each framed by its length in 8 little-endian bytes."""
    digest = hashlib.sha256()
    for part in (tokenizer, chat_template.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
