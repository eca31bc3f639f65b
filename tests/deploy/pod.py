"""A pod of a Kubernetes manifest as processes on this machine, started, probed and ended as a kubelet does."""

import contextlib
import itertools
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.container import Container, Place, read_image
from tests.project.tree import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"


def read_documents(*paths: Path) -> list[dict[str, Any]]:
    """Read all documents of some manifests."""
    return list(itertools.chain.from_iterable(yaml.safe_load_all(path.read_text()) for path in paths))


def pod_of(documents: Sequence[Mapping[str, Any]], deployment: str) -> Mapping[str, Any]:
    """Find a Deployment's pod."""
    found = [d for d in documents if d["kind"] == "Deployment" and d["metadata"]["name"] == deployment]
    spec: Mapping[str, Any] = found[0]["spec"]["template"]["spec"]
    return spec


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Pod:
    """Containers in the order of their start: native sidecars first, each waited for."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        folder: Path,
        secrets: Mapping[str, Path],
        others: Mapping[str, str] = {},
    ) -> None:
        """``secrets`` are folders by the names of Secrets; ``folder`` holds everything else. Its path is short."""
        self.sidecars: list[Mapping[str, Any]] = spec.get("initContainers", [])
        self.mains: list[Mapping[str, Any]] = spec["containers"]
        self.containers: dict[str, Container] = {}
        ports = [port["containerPort"] for one in self._specs for port in one.get("ports", [])]
        self._ports = {number: free_port() for number in ports}
        self._places: dict[str, Place] = {}
        volumes = {volume["name"]: _folder_of(volume, folder, secrets) for volume in spec.get("volumes", [])}
        for one in self._specs:
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in one.get("volumeMounts", [])}
            mounts.pop("/tmp", None)  # is there, and other folders here lie below it
            self._places[one["name"]] = place = Place(mounts, self._ports, others)
            image = read_image(one["image"])
            argv = one["command"] if "command" in one else [*image.entrypoint, *one.get("args", image.command)]
            environment = {key: place.text(value) for key, value in image.environment.items()}
            log = folder / f"{one['name']}.log"
            self.containers[one["name"]] = Container(one["name"], [*map(place.text, argv)], environment, log)
        self._ended = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for container in self.containers.values():
            self._ended.enter_context(container)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.close()

    @property
    def _specs(self) -> Iterator[Mapping[str, Any]]:
        return itertools.chain(self.sidecars, self.mains)

    def port(self, number: int) -> int:
        """Tell where a port of the manifest is here."""
        return self._ports[number]

    def start(self) -> None:
        """Start everything, and wait until every probe is answered well."""
        for one in self.sidecars:
            assert one["restartPolicy"] == "Always", f"{one['name']} is no sidecar"
            self.containers[one["name"]].start()
            self.wait_for(one, "startupProbe")
        for one in self.mains:
            self.containers[one["name"]].start()
        for one in self._specs:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe in one:
                    self.wait_for(one, probe)

    def wait_for(self, one: Mapping[str, Any], probe: str) -> None:
        self.containers[one["name"]].until(lambda: self.answers(one, probe), probe)

    def answers(self, one: Mapping[str, Any], probe: str) -> bool:
        """Make one probe."""
        spec = one[probe]
        if "grpc" in spec:
            return _grpc_serves(self.port(spec["grpc"]["port"]), spec["grpc"]["service"])
        names = {port["name"]: port["containerPort"] for port in one["ports"]}
        return _http_answers(self.port(names[spec["httpGet"]["port"]]), spec["httpGet"]["path"])

    def stop(self) -> list[str]:
        """End everything in a kubelet's order; returns the names of the containers in the order of their ends.

        All main containers are told at once, each after its hook; then the sidecars, the last one first, each when the
        one before it has ended.
        """
        ends: list[str] = []
        for one in self.mains:
            hook = one.get("lifecycle", {}).get("preStop")
            if hook:
                assert self.containers[one["name"]].run(hook["exec"]["command"]) == 0
            self.containers[one["name"]].ask_to_end()
        for group in (self.mains, *([one] for one in reversed(self.sidecars))):
            for one in group:
                container = self.containers[one["name"]]
                if one in self.sidecars:
                    container.ask_to_end()
                assert container.end() == 0, container.log
                ends.append(one["name"])
        return ends


def _folder_of(volume: Mapping[str, Any], folder: Path, secrets: Mapping[str, Path]) -> Path:
    if "secret" in volume:
        return secrets[volume["secret"]["secretName"]]
    path = folder / str(volume["name"])
    path.mkdir(mode=0o700)
    return path


def _grpc_serves(port: int, service: str) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _http_answers(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return bool(200 <= answer.status < 400)
    except (OSError, urllib.error.HTTPError):
        return False
