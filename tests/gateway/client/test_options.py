from typing import Any, get_type_hints

import pytest
from google.protobuf.descriptor import Descriptor

from prefixgate.gateway.client.options import GenerateOptions, LookupOptions, WarmOptions, set_options
from prefixgate.proto import gateway_pb2, generation_pb2

INPUT = {"prompt", "token_ids", "chat"}


def fields_of(message: Descriptor) -> set[str]:
    """List the names under which a request's fields are options."""
    names = set()
    for field in message.fields:
        if field.name in ("sampling", "cache"):
            assert isinstance(field.message_type, Descriptor)
            names |= {"cache_mode" if inner == "mode" else inner for inner in fields_of(field.message_type)}
        elif field.name not in INPUT:
            names.add(field.name)
    return names


@pytest.mark.parametrize(
    ("options", "request_type", "own"),
    [
        (GenerateOptions, gateway_pb2.GenerateRequest, set()),
        (WarmOptions, gateway_pb2.WarmRequest, set()),
        (LookupOptions, gateway_pb2.ExplainRequest, set()),
        (LookupOptions, gateway_pb2.PinRequest, {"ttl_seconds"}),
    ],
)
def test_every_field_of_a_request_is_an_option(options: Any, request_type: Any, own: set[str]) -> None:
    assert set(get_type_hints(options)) | own == fields_of(request_type.DESCRIPTOR)


def test_each_option_reaches_its_field() -> None:
    request = gateway_pb2.GenerateRequest()
    options = GenerateOptions(
        model="m",
        n=2,
        stop=["a", "b"],
        priority=-3,
        time_limit_ms=50,
        temperature=0.0,
        seed=-9,
        stop_ids=[1, 2],
        ignore_eos=True,
        logit_bias={3: -1.5},
        cache_mode="read_only",
        salt="s",
        retention=7,
    )
    set_options(request, options)
    expected = gateway_pb2.GenerateRequest(
        model="m",
        n=2,
        stop=["a", "b"],
        priority=-3,
        time_limit_ms=50,
        sampling=generation_pb2.SamplingParams(
            temperature=0.0, seed=-9, stop_ids=[1, 2], ignore_eos=True, logit_bias={3: -1.5}
        ),
        cache=generation_pb2.CacheControl(mode=generation_pb2.CACHE_MODE_READ_ONLY, salt="s", retention=7),
    )
    assert request == expected
    # A zero that was given is a zero, and not "nothing said".
    assert request.sampling.HasField("temperature")


def test_a_salt_stands_where_the_request_has_it() -> None:
    explain, warm = gateway_pb2.ExplainRequest(), gateway_pb2.WarmRequest()
    set_options(explain, LookupOptions(salt="s"))
    set_options(warm, WarmOptions(salt="s"))
    assert (explain.salt, warm.cache.salt) == ("s", "s")


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"top_q": 1}, TypeError, "top_q: there is no such option"),
        ({"sampling": 1}, TypeError, "sampling: there is no such option"),
        ({"mode": "bypass"}, TypeError, "mode"),
        ({"top_k": "many"}, TypeError, "top_k: 'many' is not allowed"),
        ({"top_k": 1 << 70}, ValueError, "top_k: "),
        ({"stop": "abc"}, TypeError, "stop: 'abc' is not allowed: a list is wanted"),
        ({"stop_ids": [-1]}, ValueError, "stop_ids: "),
        ({"cache_mode": "never"}, ValueError, "cache_mode: 'never' is not allowed"),
        ({"stop": ["\udc80"]}, ValueError, "stop: "),
    ],
)
def test_what_a_field_cannot_hold_is_refused_by_name(options: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        set_options(gateway_pb2.GenerateRequest(), options)
