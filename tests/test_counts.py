import pytest

from tests.counts import SOAK_VARIABLE, scaled


def test_a_twentieth_is_run_unless_the_soak_asks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOAK_VARIABLE, raising=False)
    assert [scaled(full) for full in (1, 20, 1000)] == [1, 1, 50]
    monkeypatch.setenv(SOAK_VARIABLE, "1")
    assert [scaled(full) for full in (1, 20, 1000)] == [1, 20, 1000]
