import argparse
from typing import Any, get_type_hints

import pytest

from prefixgate.gateway.client import GenerateOptions, LookupOptions, WarmOptions
from prefixgate.gateway.client.options import set_options
from prefixgate.gateway.commands.option_flags import add_option_flags, options_from
from prefixgate.proto import gateway_pb2

GIVEN = {
    "model": ("m", "m"),
    "salt": ("s", "s"),
    "request_id": ("r", "r"),
    "priority": ("-3", -3),
    "cache_mode": ("read_only", "read_only"),
    "ttl_seconds": ("1.5", 1.5),
    "retention": ("7", 7),
    "n": ("2", 2),
    "stop": ("x", ["x"]),
    "time_limit_ms": ("50", 50),
    "temperature": ("0", 0.0),
    "top_k": ("4", 4),
    "top_p": ("0.75", 0.75),
    "min_p": ("0.25", 0.25),
    "seed": ("-9", -9),
    "max_tokens": ("5", 5),
    "min_tokens": ("1", 1),
    "stop_ids": ("1,2", [1, 2]),
    "ignore_eos": (None, True),
    "repetition_penalty": ("1.5", 1.5),
    "presence_penalty": ("-1", -1.0),
    "frequency_penalty": ("1", 1.0),
    "logit_bias": ("3=-1.5", {3: -1.5}),
    "allowed_ids": ("1,2,3", [1, 2, 3]),
    "banned_ids": ("4", [4]),
    "logprobs": ("2", 2),
    "prompt_logprobs": ("0", 0),
}


def parsed(options: type[Any], arguments: list[str], without: tuple[str, ...] = ()) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_option_flags(parser, options, without)
    return options_from(parser.parse_args(arguments), options, without)


@pytest.mark.parametrize("options", [GenerateOptions, WarmOptions, LookupOptions])
def test_every_option_is_a_flag_that_gives_its_value(options: type[Any]) -> None:
    names = set(get_type_hints(options))
    arguments = []
    for name in names:
        text, _ = GIVEN[name]
        arguments.append(f"--{name.replace('_', '-')}" + ("" if text is None else f"={text}"))
    given = parsed(options, arguments)
    assert given == {name: value for name, (_, value) in GIVEN.items() if name in names}


def test_all_together_make_a_request() -> None:
    request = gateway_pb2.GenerateRequest()
    set_options(request, GenerateOptions(**{name: value for name, (_, value) in GIVEN.items()}))  # type: ignore[typeddict-item]
    assert dict(request.sampling.logit_bias) == {3: -1.5}


def test_what_was_not_given_is_not_an_option() -> None:
    assert parsed(GenerateOptions, []) == {}


def test_some_can_be_left_out() -> None:
    with pytest.raises(SystemExit):
        parsed(GenerateOptions, ["--n", "2"], ("n",))
    assert parsed(GenerateOptions, ["--seed", "2"], ("n",)) == {"seed": 2}
