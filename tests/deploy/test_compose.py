"""The services of compose.yaml that are ours, run as their command lines say."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.caller import Caller, tokens_of
from tests.deploy.container import Container, Place, read_image
from tests.deploy.pod import free_port
from tests.deploy.secrets import make_secrets, run_script
from tests.project.tree import ROOT

COMPOSE = ROOT / "deploy" / "compose.yaml"


def read_services() -> Mapping[str, Mapping[str, Any]]:
    services: Mapping[str, Mapping[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return services


def test_gateway_and_worker_start_in_order_are_healthy_and_drain(folder: Path) -> None:
    secrets = make_secrets(folder / "secrets")
    services = read_services()
    ports = {port: free_port() for port in (8050, 8051, 8052)}
    (folder / "socket").mkdir(mode=0o700)
    (folder / "cache").mkdir()
    containers = {}
    for name in ("worker", "gateway"):
        service = services[name]
        places = {"/run/secrets/hash.key": secrets / "hash.key"}
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            places[target] = folder / source.removeprefix("./")
            assert places[target].exists()
        place = Place(places, ports)
        image = read_image(service["image"])
        argv = [*image.entrypoint, *service["command"]]
        environment = {key: place.text(value) for key, value in image.environment.items()}
        containers[name] = Container(name, [*map(place.text, argv)], environment, folder / f"{name}.log")
        check = [place.text(part) for part in service["healthcheck"]["test"]]
        assert check[0] == "CMD"
        containers[name].healthcheck = check[1:]
    with containers["worker"] as worker, containers["gateway"] as gateway:
        for container in (worker, gateway):
            container.start()
            container.until(container.is_healthy, "healthy")
        caller = Caller(ports[8050], secrets)
        stream = caller.stream(100)
        first = next(stream)
        for container in (gateway, worker):
            container.ask_to_end()
            assert container.end() == 0, container.log
        assert tokens_of([first, *stream]) == 100
        caller.close()
        # A health check is no answer of a process that has ended.
        assert not gateway.is_healthy()


def test_files_that_are_mounted_are_there(tmp_path: Path) -> None:
    run_script(tmp_path / "secrets")
    compose = yaml.safe_load(COMPOSE.read_text())
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./secrets/"):
                assert (tmp_path / source).exists()
            elif source.startswith("."):
                assert (COMPOSE.parent / source).exists(), source
            else:
                assert source in compose["volumes"]
        for secret in service.get("secrets", []):
            assert (tmp_path / compose["secrets"][secret["source"]]["file"]).exists()
        if "build" in service:
            assert (COMPOSE.parent / service["build"]["context"] / service["build"]["dockerfile"]).exists()


def test_nobody_administers_grafana_by_the_password_that_it_comes_with() -> None:
    environment = read_services()["grafana"]["environment"]
    assert (environment["GF_AUTH_DISABLE_LOGIN_FORM"], environment["GF_AUTH_BASIC_ENABLED"]) == ("true", "false")
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
