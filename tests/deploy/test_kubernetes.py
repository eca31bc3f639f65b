"""The manifests are what Kubernetes takes, and hang together."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from prefixgate.config.version import VERSION
from tests.deploy.pod import KUBERNETES, read_documents
from tests.deploy.secrets import run_script
from tests.project.tree import ROOT

KUSTOMIZATIONS = sorted(path.parent.name for path in KUBERNETES.glob("*/kustomization.yaml"))
RESOURCES = sorted(path for path in KUBERNETES.glob("*/*.yaml") if path.name != "kustomization.yaml")
SECRETS = {"sidecar": "sidecar", "fleet": "fleet", "inference-pool": "sidecar"}
"""Which folder's secrets each kustomization reads."""
KUBERNETES_VERSION = "1.32"

_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_SELECTOR = {
    "type": "object",
    "properties": {"matchLabels": _LABELS},
    "required": ["matchLabels"],
    "additionalProperties": False,
}
EXTENSIONS: Mapping[str, Mapping[str, Any]] = {
    # What of these resources is used here; the schemas of Kubernetes itself do not know them.
    "PodMonitor": {
        "type": "object",
        "properties": {
            "selector": _SELECTOR,
            "podMetricsEndpoints": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {
                        "port": {"type": "string"},
                        "path": {"const": "/metrics"},
                        "interval": {"type": "string", "pattern": "^[0-9]+s$"},
                        "relabelings": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "properties": {"targetLabel": {"const": "job"}, "replacement": {"type": "string"}},
                                "required": ["targetLabel", "replacement"],
                                "additionalProperties": False,
                            },
                        },
                    },
                    "required": ["port"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["selector", "podMetricsEndpoints"],
        "additionalProperties": False,
    },
    "InferencePool": {
        "type": "object",
        "properties": {
            "selector": _SELECTOR,
            "targetPorts": {
                "type": "array",
                "minItems": 1,
                "maxItems": 8,
                "items": {
                    "type": "object",
                    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
                    "required": ["number"],
                    "additionalProperties": False,
                },
            },
            "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
            "endpointPickerRef": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "port": {
                        "type": "object",
                        "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
                        "required": ["number"],
                        "additionalProperties": False,
                    },
                    "failureMode": {"enum": ["FailOpen", "FailClose"]},
                },
                "required": ["name", "port"],
                "additionalProperties": False,
            },
        },
        "required": ["selector", "targetPorts", "endpointPickerRef"],
        "additionalProperties": False,
    },
}

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def check(document: Mapping[str, Any]) -> None:
    """Hold a resource to its schema; fields that there are not are errors."""
    extension = EXTENSIONS.get(document["kind"])
    if extension is None:
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
    else:
        jsonschema.validate(document["spec"], extension)
        assert re.fullmatch(r"(monitoring\.coreos\.com|inference\.networking\.k8s\.io)/v1", document["apiVersion"])


@pytest.mark.parametrize("path", RESOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_resource_fits_its_schema(path: Path) -> None:
    for document in read_documents(path):
        check(document)


def test_the_check_finds_what_is_wrong() -> None:
    workers = read_documents(KUBERNETES / "fleet" / "workers.yaml")[1]
    workers["spec"]["template"]["spec"]["containers"][0]["readyProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check(workers)
    monitor = read_documents(KUBERNETES / "fleet" / "pod-monitors.yaml")[0]
    monitor["spec"]["podMetricsEndpoints"][0]["portname"] = "x"
    with pytest.raises(jsonschema.ValidationError):
        check(monitor)


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_a_kustomization_names_every_file_beside_it(name: str) -> None:
    folder = KUBERNETES / name
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    own = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert {file for file in kustomization["resources"] if "/" not in file} == own
    for image in kustomization.get("images", []):
        assert image["newTag"] == VERSION


def build(name: str, folder: Path) -> list[dict[str, Any]]:
    """Build a kustomization as ``kubectl apply -k`` does, on a copy with secrets made as its first lines say."""
    shutil.copytree(KUBERNETES, folder / "kubernetes")
    head = (KUBERNETES / name / "kustomization.yaml").read_text()
    (arguments,) = re.findall(r"^#   deploy/secrets.sh deploy/(\S+)(?: (\S+))?$", head, re.MULTILINE)
    run_script(folder / arguments[0], arguments[1])
    command = ["kubectl", "kustomize", str(folder / "kubernetes" / name)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return list(yaml.safe_load_all(output))


@needs_kubectl
@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_what_kustomize_makes_fits_the_schemas_and_hangs_together(name: str, tmp_path: Path) -> None:
    documents = build(name, tmp_path)
    for document in documents:
        check(document)
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == "prefixgate"
    secrets = {document["metadata"]["name"]: document for document in documents if document["kind"] == "Secret"}
    pods = {d["metadata"]["name"]: d["spec"]["template"] for d in documents if d["kind"] == "Deployment"}
    for pod in pods.values():
        for volume in pod["spec"]["volumes"]:
            assert "secret" not in volume or volume["secret"]["secretName"] in secrets
        for container in containers(pod):
            assert container["image"].endswith(f":{VERSION}")
    # Whatever selects pods finds some, and every port that is named is one of theirs.
    for document in documents:
        for selector, ports in selections(document):
            chosen = [pod for pod in pods.values() if selector.items() <= pod["metadata"]["labels"].items()]
            assert chosen, f"{document['kind']} {document['metadata']['name']} selects no pod"
            there = {port["name"] for pod in chosen for one in containers(pod) for port in one.get("ports", [])}
            assert set(ports) <= there
    for document in documents:
        if document["kind"] == "HorizontalPodAutoscaler":
            assert document["spec"]["scaleTargetRef"]["name"] in pods


def containers(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def selections(document: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, str], list[str]]]:
    """List what a resource selects by labels, with the names of the ports that it wants there."""
    spec = document.get("spec", {})
    match document["kind"]:
        case "Service":
            yield spec["selector"], [port["targetPort"] for port in spec["ports"]]
        case "PodDisruptionBudget":
            yield spec["selector"]["matchLabels"], []
        case "PodMonitor":
            yield spec["selector"]["matchLabels"], [end["port"] for end in spec["podMetricsEndpoints"]]
        case "InferencePool":
            yield spec["selector"]["matchLabels"], []
        case "NetworkPolicy":
            ports = [port["port"] for rule in spec.get("ingress", []) for port in rule["ports"]]
            yield spec["podSelector"]["matchLabels"], ports


@needs_kubectl
def test_in_a_pair_the_gateway_is_the_main_container_and_the_worker_its_sidecar(tmp_path: Path) -> None:
    (pair,) = [d for d in build("inference-pool", tmp_path) if d["kind"] == "Deployment"]
    spec = pair["spec"]["template"]["spec"]
    assert [(one["name"], one.get("restartPolicy")) for one in spec["containers"]] == [("gateway", None)]
    assert [(one["name"], one["restartPolicy"]) for one in spec["initContainers"]] == [("worker", "Always")]


@pytest.mark.parametrize("path", RESOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_pods_run_with_the_least_that_they_need_and_have_time_to_drain(path: Path) -> None:
    for document in read_documents(path):
        if document["kind"] != "Deployment":
            continue
        pod = document["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["automountServiceAccountToken"] is False
        drains = 0.0
        for one in containers(document["spec"]["template"]):
            context = one["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert ("nvidia.com/gpu" in one["resources"]["limits"]) == (one["name"] == "worker")
            (seconds,) = re.findall(r"-drain-seconds=(\d+)", " ".join(one.get("args", []))) or ["0"]
            hook = one.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
            drains += float(seconds) + float(hook[1])
        assert pod["terminationGracePeriodSeconds"] > drains


def test_the_manifests_are_well_formed_for_yamllint() -> None:
    command = [str(Path(sys.executable).with_name("yamllint")), "--strict", "-c", ".yamllint.yaml", "deploy"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout
