"""The adapter's calls fit the real functions, where the package is installed; it imports without a GPU."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefixgate.cache.kv_storage import KVLayout
from prefixgate.worker.attention import AttentionShape, AttentionUnavailableError
from prefixgate.worker.attention_check import check_attention
from prefixgate.worker.flash_attention import FlashAttention
from prefixgate.worker.flash_functions import PACKAGES, FlashFunctions, find_flash_functions
from tests.worker.flash_double import FlashDouble

FUNCTIONS = ("flash_attn_varlen_func", "flash_attn_with_kvcache")


@pytest.fixture(scope="module")
def package() -> Any:
    try:
        find_flash_functions()
    except AttentionUnavailableError as error:
        pytest.skip(str(error))
    for name in PACKAGES:
        try:
            return __import__(name, fromlist=["*"])
        except ImportError:
            continue
    raise AssertionError("it was found a moment ago")


def bound(real: Callable[..., Any], double: Callable[..., Any], seen: list[str]) -> Callable[..., Any]:
    """Bind each call to a real function's parameters, then let the double compute."""
    signature = inspect.signature(real)

    def call(*arguments: Any, **options: Any) -> Any:
        signature.bind(*arguments, **options)
        seen.append(real.__name__)
        return double(*arguments, **options)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def test_every_call_of_the_adapter_fits_the_real_functions(package: Any) -> None:
    functions = FlashFunctions(package)
    double, seen = FlashDouble(), list[str]()
    doubled = double.old() if functions.old else double.new()
    module = SimpleNamespace(
        __name__="bound",
        **{
            name: bound(getattr(package, name), getattr(doubled, name), seen)
            for name in FUNCTIONS
            if hasattr(doubled, name)
        },
    )
    shape = AttentionShape(KVLayout(2, 2, 32, torch.bfloat16), 8, windows=True, softcap=True)
    check_attention(FlashAttention(FlashFunctions(module)), shape, torch.device("cpu"))
    assert set(seen) == {name for name in FUNCTIONS if hasattr(doubled, name)}


def test_the_doubles_have_the_parameters_of_the_real_functions(package: Any) -> None:
    doubled = FlashDouble().old() if FlashFunctions(package).old else FlashDouble().new()
    for name in FUNCTIONS:
        if hasattr(doubled, name):
            assert set(inspect.signature(getattr(doubled, name)).parameters) <= set(
                inspect.signature(getattr(package, name)).parameters
            )
