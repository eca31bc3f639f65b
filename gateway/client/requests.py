"""The requests that both clients send."""

from typing import TypeVar

from prefixgate.gateway.client.options import GenerateOptions, LookupOptions, WarmOptions, set_options
from prefixgate.gateway.client.prompt import Prompt, Request, set_input
from prefixgate.proto import gateway_pb2

RequestT = TypeVar("RequestT", bound=Request)


def generate_request(prompt: Prompt, options: GenerateOptions) -> gateway_pb2.GenerateRequest:
    """Make the request of ``generate`` and ``complete``."""
    return _request(gateway_pb2.GenerateRequest(), prompt, options)


def tokenize_request(prompt: Prompt) -> gateway_pb2.TokenizeRequest:
    """Make the request of ``tokenize``."""
    return _request(gateway_pb2.TokenizeRequest(), prompt, {})


def explain_request(prompt: Prompt, options: LookupOptions) -> gateway_pb2.ExplainRequest:
    """Make the request of ``explain``."""
    return _request(gateway_pb2.ExplainRequest(), prompt, options)


def warm_request(prompt: Prompt, options: WarmOptions) -> gateway_pb2.WarmRequest:
    """Make the request of ``warm``."""
    return _request(gateway_pb2.WarmRequest(), prompt, options)


def pin_request(prompt: Prompt, ttl_seconds: float, options: LookupOptions) -> gateway_pb2.PinRequest:
    """Make the request of ``pin``."""
    return _request(gateway_pb2.PinRequest(ttl_seconds=ttl_seconds), prompt, options)


def _request(request: RequestT, prompt: Prompt, options: LookupOptions) -> RequestT:
    set_input(request, prompt)
    set_options(request, options)
    return request
