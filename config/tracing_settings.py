"""Tracing: whether calls are traced, which of them, and where the spans go."""

from dataclasses import dataclass

from prefixgate.config.kinds import Flag, Number, Text
from prefixgate.config.setting import setting


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """OpenTelemetry spans of calls, of the gateway and of the worker (`docs/tracing.md`). Needs the extra `otel`."""

    endpoint: str = setting(
        "",
        Text("an http:// or https:// URL without a user name", r"(?:https?://[^\s@]+)?", max_bytes=1024),
        "Where spans are sent, the URL of an OTLP receiver that takes HTTP, such as "
        '"http://127.0.0.1:4318/v1/traces". Empty: nothing is traced.',
        flag="--tracing-endpoint",
    )
    sample_ratio: float = setting(
        0.1,
        Number(0, 1),
        "Part of the calls that are traced. The gateway decides; a worker traces what its gateway does.",
        flag="--tracing-sample-ratio",
    )
    trust_clients: bool = setting(
        False,
        Flag(),
        "Continue the trace that a client's metadata `traceparent` names, and follow what it says of sampling. Else a "
        "call begins a trace of its own, with a link to the client's: whoever can call could have everything traced.",
        flag="--tracing-trust-clients",
    )
