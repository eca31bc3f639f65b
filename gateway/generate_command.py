"""`prefixgate generate`: one call to a running gateway, streamed to the terminal."""

import argparse
import os
import signal
import sys

import grpc

from prefixgate.config.address import Address, parse_address
from prefixgate.config.settings import GatewaySettings
from prefixgate.gateway.answer import Answer
from prefixgate.gateway.console import discard_output
from prefixgate.proto import gateway_pb2, gateway_pb2_grpc, generation_pb2
from prefixgate.proto.transport import CHANNEL_OPTIONS

API_KEY_VARIABLE = "PREFIXGATE_API_KEY"

_Metadata = tuple[tuple[str, str], ...]


class _CallFailedError(Exception):
    """The call did not go well; the text is for the user."""


def add_generate_arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Add the arguments of `generate`, and return them. Ranges are the gateway's to check."""
    add = parser.add_argument
    form = parser.add_mutually_exclusive_group()
    listen = GatewaySettings().listen
    return [
        add("prompt", metavar="PROMPT", help='what to say to the model; "-" reads it from standard input'),
        add("--gateway", metavar="ADDRESS", type=_address, default=listen, help=f"the gateway; default {listen}"),
        add("--api-key", metavar="KEY", help=f"the tenant's API key; better in the variable {API_KEY_VARIABLE}"),
        form.add_argument("--system", metavar="TEXT", help="a system message to begin the chat with"),
        form.add_argument(
            "--raw", action="store_true", help="send the text as it is, without the model's chat template"
        ),
        add("--max-tokens", metavar="N", type=_int64, help="longest output, in tokens"),
        add("--temperature", metavar="T", type=float, help="softmax temperature; 0, the default, is greedy"),
        add("--top-k", metavar="K", type=_int64, help="sample among the K most likely tokens"),
        add("--top-p", metavar="P", type=float, help="sample among the likeliest tokens that sum to probability P"),
        add("--seed", metavar="SEED", type=_int64, help="fixes the random choices"),
        add("--n", metavar="N", type=_int64, help="number of outputs; they share the prompt"),
        add("--stop", metavar="TEXT", action="append", default=[], help="text that ends the output; can be repeated"),
        add("--json", action="store_true", help="print one JSON object at the end instead of streaming text"),
    ]


def generate(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code: 0, 1 after an error, 130 after Ctrl-C, 141 when nobody reads on."""
    try:
        request, metadata = _request(args), _metadata(args)
        with grpc.insecure_channel(str(args.gateway), options=CHANNEL_OPTIONS) as channel:
            answer = _call(channel, request, metadata, Answer(quiet=args.json))
        if args.json:
            answer.show_json()
        else:
            answer.show_rest()
    except _CallFailedError as error:
        sys.stderr.write(f"prefixgate generate: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        discard_output()
        return 128 + signal.SIGPIPE
    return 0


def _call(channel: grpc.Channel, request: gateway_pb2.GenerateRequest, metadata: _Metadata, answer: Answer) -> Answer:
    """Make the call and show it as it comes; whatever interrupts that cancels the call."""
    call = gateway_pb2_grpc.GatewayStub(channel).Generate(request, metadata=metadata)
    try:
        for message in call:
            answer.add(message)
    except grpc.RpcError as error:
        raise _CallFailedError(_reason(call.code(), call.details())) from error
    finally:
        call.cancel()  # does nothing to a call that has ended
    if not answer.complete:
        raise _CallFailedError("the answer broke off: its stream ended without the terminal message")
    return answer


def _reason(code: grpc.StatusCode, details: str | None) -> str:
    words = " ".join((details or "no reason given").split())
    if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in words.lower():
        return "no gateway answers there; `prefixgate serve` starts one, and --gateway names another address"
    return f"{code.name}: {words}"


def _request(args: argparse.Namespace) -> gateway_pb2.GenerateRequest:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    request = gateway_pb2.GenerateRequest(
        n=args.n,
        sampling=generation_pb2.SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
        ),
    )
    try:
        request.stop.extend(args.stop)
        if args.raw:
            request.prompt = prompt
        else:
            if args.system is not None:
                request.chat.messages.add(role="system", content=args.system)
            request.chat.messages.add(role="user", content=prompt)
    except ValueError as error:  # the shell hands over bytes that are not UTF-8 as lone surrogates
        raise _CallFailedError("the prompt, the system message or a stop text is not UTF-8") from error
    return request


def _metadata(args: argparse.Namespace) -> _Metadata:
    key = os.environ.get(API_KEY_VARIABLE, "") if args.api_key is None else args.api_key
    # gRPC would refuse it too, with the key in its message.
    if not (key.isascii() and key.isprintable()):
        raise _CallFailedError("the API key holds characters that no API key has")
    return (("authorization", f"Bearer {key}"),) if key else ()


def _address(text: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _int64(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 1 << 63
    if not -(1 << 63) <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 64 bits")
    return value
