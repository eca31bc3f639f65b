"""The options of a call as flags: one for each, under the option's own name."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints


class _Flag(NamedTuple):
    metavar: str
    help: str


# Ranges and defaults are the gateway's; what they are stands in docs/api.md.
_FLAGS: Mapping[str, _Flag] = {
    "max_tokens": _Flag("N", "longest output, in tokens"),
    "temperature": _Flag("T", "softmax temperature; 0, the default, is greedy"),
    "top_k": _Flag("K", "sample among the K most likely tokens"),
    "top_p": _Flag("P", "sample among the likeliest tokens that sum to probability P"),
    "min_p": _Flag("P", "sample no token less likely than P times the likeliest"),
    "seed": _Flag("SEED", "fixes the random choices"),
    "n": _Flag("N", "number of outputs; they share the prompt"),
    "stop": _Flag("TEXT", "text that ends the output; can be repeated"),
    "stop_ids": _Flag("IDS", "token ids that end the output, with commas between"),
    "ignore_eos": _Flag("", "go on where the model would end"),
    "min_tokens": _Flag("N", "shortest output, in tokens"),
    "repetition_penalty": _Flag("X", "divides the logits of tokens that prompt or output hold"),
    "presence_penalty": _Flag("X", "subtracted once from the logits of tokens that the output holds"),
    "frequency_penalty": _Flag("X", "subtracted for each time that the output holds a token"),
    "logit_bias": _Flag("ID=X", "added to a token's logit; can be repeated"),
    "allowed_ids": _Flag("IDS", "sample only these token ids, with commas between"),
    "banned_ids": _Flag("IDS", "never sample these token ids, with commas between"),
    "logprobs": _Flag("K", "with --json: how likely each token was, and the K likeliest beside it"),
    "prompt_logprobs": _Flag("K", "with --json: the same for the prompt, which is then computed without the cache"),
    "time_limit_ms": _Flag("MS", "milliseconds after which what is there is the answer"),
    "cache_mode": _Flag("MODE", "what the call reads and keeps of the cache: default, read_only or bypass"),
    "salt": _Flag("TEXT", "share cached blocks only with calls of the same salt"),
    "ttl_seconds": _Flag("SECONDS", "how long the prompt's blocks should stay cached"),
    "retention": _Flag("N", "priority of the blocks kept: lower ones are evicted first"),
    "priority": _Flag("N", "higher goes first among the tenant's waiting calls"),
    "model": _Flag("NAME", "the model that must be served; default: whichever is"),
    "request_id": _Flag("TEXT", "name of the call in the gateway's log"),
}


def add_option_flags(parser: argparse.ArgumentParser, options: type[Any], without: Sequence[str] = ()) -> None:
    """Add a flag for each option of a kind of call (a TypedDict of the client), but for some."""
    group = parser.add_argument_group("the call")
    for name in _names(options, without):
        flag = _FLAGS[name]
        group.add_argument(
            f"--{name.replace('_', '-')}", dest=name, help=flag.help, **_reading(options, name, flag.metavar)
        )


def options_from(args: argparse.Namespace, options: type[Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """Collect the options that were given."""
    given = {name: getattr(args, name) for name in _names(options, without)}
    if given.get("logit_bias") is not None:
        given["logit_bias"] = dict(given["logit_bias"])
    return {name: value for name, value in given.items() if value is not None}


def _names(options: type[Any], without: Sequence[str]) -> Iterable[str]:
    own = get_type_hints(options)
    return (name for name in _FLAGS if name in own and name not in without)


def _reading(options: type[Any], name: str, metavar: str) -> dict[str, Any]:
    """Choose how argparse reads an option, by its type."""
    kind = get_type_hints(options)[name]
    if kind is bool:
        return {"action": "store_true", "default": None}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind), "metavar": metavar}
    plain: Mapping[Any, Callable[[str], Any]] = {str: str, int: _int64, float: float, Sequence[int]: _ids}
    if kind in plain:
        return {"type": plain[kind], "metavar": metavar}
    return {"action": "append", "type": str if kind == Sequence[str] else _bias, "metavar": metavar}


def _int64(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 1 << 63
    if not -(1 << 63) <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 64 bits")
    return value


def _ids(text: str) -> list[int]:
    return [_token_id(part) for part in text.split(",")]


def _token_id(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a token id")
    return value


def _bias(text: str) -> tuple[int, float]:
    token_id, equals, bias = text.partition("=")
    try:
        return _token_id(token_id), float(bias if equals else "none")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=NUMBER") from None
