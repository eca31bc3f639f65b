"""What both ends of a hop agree on."""

import asyncio
import hashlib

import grpc.aio
import pytest

from prefixgate.config import limit_settings
from prefixgate.config.settings import GatewaySettings
from prefixgate.proto.transport import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES, SERVER_OPTIONS, client_facing, text_digest


def test_both_ends_take_messages_of_one_size() -> None:
    for options in (dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)):
        sizes = options["grpc.max_send_message_length"], options["grpc.max_receive_message_length"]
        assert sizes == (MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES)


def test_what_a_client_may_send_can_be_bounded_to_less_and_the_hop_behind_takes_all_of_it() -> None:
    options = dict(client_facing(1 << 20))
    assert options["grpc.max_receive_message_length"] == 1 << 20
    assert {**dict(SERVER_OPTIONS), **options} == options
    # The settings, which know nothing of the transport, allow no more.
    assert GatewaySettings().max_message_bytes == limit_settings.MAX_MESSAGE_BYTES == MAX_MESSAGE_BYTES


def test_a_server_bears_the_pings_that_a_channel_sends() -> None:
    server, channel = dict(SERVER_OPTIONS), dict(CHANNEL_OPTIONS)
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < channel["grpc.keepalive_time_ms"]
    assert server["grpc.http2.max_ping_strikes"] == 0
    assert channel["grpc.keepalive_permit_without_calls"] == 1


def test_a_dead_peer_is_found_as_soon_on_either_end() -> None:
    for options in (dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)):
        assert options["grpc.http2.ping_timeout_ms"] == options["grpc.keepalive_timeout_ms"] == 10_000


def test_a_second_server_on_a_used_port_is_an_error() -> None:
    async def scenario() -> None:
        first, second = grpc.aio.server(options=SERVER_OPTIONS), grpc.aio.server(options=SERVER_OPTIONS)
        port = first.add_insecure_port("127.0.0.1:0")
        await first.start()
        with pytest.raises(RuntimeError):
            second.add_insecure_port(f"127.0.0.1:{port}")
        await first.stop(None)
        await second.stop(None)

    asyncio.run(scenario())


def test_the_digest_frames_its_parts() -> None:
    framed = (2).to_bytes(8, "little") + b"ab" + (1).to_bytes(8, "little") + b"c"
    assert text_digest(b"ab", "c") == hashlib.sha256(framed).digest()
    assert text_digest(b"ab", "c") != text_digest(b"a", "bc")
