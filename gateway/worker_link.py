"""How the gateway reaches its workers: by which credentials, and with which proof that it is a gateway."""

from dataclasses import dataclass, field

import grpc.aio

from prefixgate.config.address import parse_address, parse_worker_address
from prefixgate.config.settings import GatewaySettings, SettingsError
from prefixgate.proto import worker_pb2_grpc
from prefixgate.proto.access import proving
from prefixgate.proto.tls import client_credentials
from prefixgate.proto.transport import CHANNEL_OPTIONS, IN_THE_CLEAR

# gRPC by itself waits up to two minutes before it tries a lost worker's address again.
_EAGER = tuple((f"grpc.{name}_reconnect_backoff_ms", 250) for name in ("initial", "min", "max"))


@dataclass(frozen=True, slots=True)
class WorkerLink:
    """What all workers have in common."""

    secret: bytes = field(default=b"", repr=False)
    """The proof, as ``proto.access`` has workers check it."""
    ca: str = ""
    """File with the authorities that sign workers' certificates; empty for connections without TLS."""
    certificate: str = ""
    key: str = ""
    """Files with what this gateway shows of itself; empty for nothing."""
    name: str = ""
    """Name that the certificates hold; empty for the host in the worker's address."""

    def open(self, address: str) -> grpc.aio.Channel:
        """Open a channel to a worker, by TLS files as they are now. Raises TlsError."""
        options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS, *_EAGER]
        if not self.ca or parse_address(address).is_unix:
            return grpc.aio.insecure_channel(address, options=[*options, *IN_THE_CLEAR])
        if self.name:
            options.append(("grpc.ssl_target_name_override", self.name))
        return grpc.aio.secure_channel(
            address, client_credentials(self.ca, self.certificate, self.key), options=options
        )

    def stub(self, channel: grpc.aio.Channel) -> "worker_pb2_grpc.WorkerAsyncStub":  # a type of the hints alone
        """Make a stub all of whose calls show the proof."""
        return worker_pb2_grpc.WorkerStub(proving(channel, self.secret))


def link_of(gateway: GatewaySettings, secret: bytes) -> WorkerLink:
    """Read the link from the settings. Raises SettingsError where it would leave this machine in the clear."""
    if not (gateway.worker_ca or gateway.insecure_workers):
        for text in gateway.workers:
            worker = parse_worker_address(text)
            if worker.is_name or not worker.address.is_local:
                raise SettingsError(
                    f"gateway.workers: {text} is on another machine, and gateway.worker_ca is not set: prompts, "
                    "answers and the proof that makes a gateway one would travel in the clear. Set up TLS, or "
                    "gateway.insecure_workers = true where the network encrypts by itself"
                )
    return WorkerLink(
        secret, gateway.worker_ca, gateway.worker_client_cert, gateway.worker_client_key, gateway.worker_tls_name
    )
