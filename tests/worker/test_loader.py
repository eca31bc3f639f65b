"""The loader: which model, how large a pool, and clear refusals."""

import re
from dataclasses import replace

import pytest

from prefixgate.cache.kv_storage import TorchKVStorage
from prefixgate.config.cache_settings import CacheSettings
from prefixgate.config.settings import WorkerSettings
from prefixgate.worker.loader import load_runner, poisons
from prefixgate.worker.model_runner import ModelRefusedError
from prefixgate.worker.witness import WitnessModel

WITNESS = WorkerSettings(model="witness:eos_every=8,context=4096")
SMALL = CacheSettings(blocks=8)


def quiet(line: str) -> None:
    """Take the progress lines of a load that says nothing of interest."""


def test_the_witness_is_loaded_with_its_options_and_pool() -> None:
    runner = load_runner(WITNESS, SMALL, quiet)
    assert isinstance(runner, WitnessModel)
    assert isinstance(runner.storage, TorchKVStorage)
    assert (runner.options.eos_every, runner.spec.context_length) == (8, 4096)
    assert runner.storage.num_blocks == 8
    assert runner.spec.name == "witness"


def test_served_name_is_the_model_s_name() -> None:
    assert load_runner(replace(WITNESS, served_name="little"), SMALL, quiet).spec.name == "little"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (replace(WITNESS, device="cuda"), "worker.device: 'cuda'"),
        (replace(WITNESS, dtype="float16"), "worker.dtype: 'float16'"),
        (replace(WITNESS, attention="sdpa"), "worker.attention: 'sdpa'"),
        (replace(WITNESS, model="witness:steps=1"), "no option 'steps'"),
    ],
)
def test_what_the_witness_cannot_do_is_refused(settings: WorkerSettings, named: str) -> None:
    with pytest.raises(ModelRefusedError, match=re.escape(named)):
        load_runner(settings, SMALL, quiet)


def test_fresh_blocks_are_poisoned_when_asked_and_always_with_the_witness() -> None:
    assert poisons(WITNESS, SMALL)
    assert poisons(WorkerSettings(model="smollm2"), replace(SMALL, poison=True))
    assert not poisons(WorkerSettings(model="smollm2"), SMALL)
