"""Every command line of the manifests runs, answers its probes, and drains when its pod ends."""

from pathlib import Path

import grpc

from tests.deploy.caller import Caller, tokens_of
from tests.deploy.pod import KUBERNETES, Pod, pod_of, read_documents
from tests.deploy.secrets import make_secrets
from tests.integration.scrape import scrape
from tests.integration.waiting import until


def test_the_sidecar_pod_starts_serves_its_application_and_ends_the_gateway_before_the_worker(folder: Path) -> None:
    secrets = make_secrets(folder / "secrets")
    spec = pod_of(read_documents(KUBERNETES / "sidecar" / "deployment.yaml"), "application")
    with Pod(spec, folder, {"prefixgate": secrets, "prefixgate-client": secrets}) as pod:
        pod.start()
        page = f"http://127.0.0.1:{pod.port(8051)}/metrics"
        # The application's own command line, which has called by then.
        until(lambda: scrape(page).total("prefixgate_gateway_calls_ended_total", code="OK"), "the application called")
        caller = Caller(pod.port(8050), secrets)
        stream = caller.stream(100)
        first = next(stream)
        assert pod.stop() == ["application", "gateway", "worker"]
        assert tokens_of([first, *stream]) == 100
        assert stream.code() is grpc.StatusCode.OK
        caller.close()
        assert [line for log in pod.containers.values() for line in log.log.splitlines() if "ERROR" in line] == []


def test_a_fleets_pods_find_each_other_and_streams_outlive_the_worker_that_drains(folder: Path) -> None:
    secrets = make_secrets(folder / "secrets", "prefixgate-workers")
    workers = read_documents(KUBERNETES / "fleet" / "workers.yaml")
    gateways = read_documents(KUBERNETES / "fleet" / "gateways.yaml")
    names = {"prefixgate": secrets, "prefixgate-worker-tls": secrets, "prefixgate-gateway-tls": secrets}
    (folder / "w").mkdir()
    (folder / "g").mkdir()
    with Pod(pod_of(workers, "prefixgate-worker"), folder / "w", names) as worker:
        worker.start()
        # The headless Service: its name is this machine's, its port the worker's.
        service = {"prefixgate-workers:8060": f"localhost:{worker.port(8060)}"}
        with Pod(pod_of(gateways, "prefixgate-gateway"), folder / "g", names, service) as gateway:
            gateway.start()
            caller = Caller(gateway.port(8050), secrets)
            stream = caller.stream(1_000)
            first = next(stream)
            # All pods of a node that is drained are told at the same time; the hooks' pauses run then.
            assert worker.stop() == ["worker"]
            assert tokens_of([first, *stream]) == 1_000
            assert stream.code() is grpc.StatusCode.OK
            assert gateway.stop() == ["gateway"]
            caller.close()
