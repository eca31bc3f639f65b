"""The contender in C++: llama.cpp over the embedded model's GGUF file, as its Python package serves it."""

import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefixgate.worker.embedded import fetch_gguf

NOT_INSTALLED = (
    "llama.cpp is not compared: llama-cpp-python is not installed. It is built from source, for instance with\n"
    '  CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_AVX512=ON" '
    "pip install '.[bench]'"
)


class LlamaModel:
    """One context, in which a prompt that begins like the one before reuses what was computed for that."""

    def __init__(self, gguf: Path | None, threads: int) -> None:
        """Load the file; None fetches the embedded model's. Raises ImportError where the package is not there."""
        import llama_cpp  # optional, and built from source

        with tempfile.TemporaryDirectory() as scratch:
            path = gguf or fetch_gguf(Path(scratch), print)
            self._model: Any = llama_cpp.Llama(
                str(path), n_ctx=2048, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
            )
        self.quantization = path.stem.rpartition(".")[2]

    def forget(self) -> None:
        """Drop what was computed."""
        self._model.reset()

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Generate greedily."""
        return list(itertools.islice(self._model.generate(list(prompt), top_k=1, temp=0.0), max_tokens))

    def first_token_ms(self, prompt: Sequence[int]) -> float:
        """Return how long the first token takes."""
        begin = time.perf_counter()
        self.generate(prompt, 1)
        return (time.perf_counter() - begin) * 1e3
