from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.commands.scripted_gateway import ScriptedGateway, scripted


@pytest.fixture
def socket(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/gateway.sock"


@pytest.fixture
def gateway(socket: str) -> Iterator[ScriptedGateway]:
    with scripted(socket) as servicer:
        yield servicer


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFIXGATE_API_KEY", raising=False)
