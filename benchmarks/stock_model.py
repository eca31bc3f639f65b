"""The contender: the same weights in the library's own hands."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig

from prefixgate.worker.conversion import cache_folder
from prefixgate.worker.embedded import embedded_folder
from prefixgate.worker.model_folder import load_model


class StockModel:
    """The embedded model, run by the library's own means."""

    def __init__(self, dtype: torch.dtype) -> None:
        folder = embedded_folder(cache_folder(), lambda line: None)
        self._folder, self._dtype = folder, dtype
        self.model: Any = self._load()
        parameters = inspect.signature(self.model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def _load(self) -> Any:
        model = load_model(self._folder, torch.device("cpu"), self._dtype)
        model.generation_config.eos_token_id = None
        return model

    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Run ``generate`` on prompts of one length as a batch."""
        ids = torch.tensor(prompts)
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
        )
        tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return tokens

    def generate_batch(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Run the library's continuous batching, on a model of its own since it changes how that attends."""
        config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = self._load().generate_batch(list(prompts), generation_config=config, progress_bar=False)
        ordered = sorted(outputs.items(), key=lambda pair: int(pair[0].rpartition("_")[2]))
        return [list(output.generated_tokens) for _, output in ordered]

    def bare(self, count: int) -> Callable[[], object]:
        """Return one forward pass of so many tokens, without a cache and without their context."""
        ids = torch.arange(10, 10 + count)[None]
        return lambda: self._forward(ids, use_cache=False)

    def bare_over(self, context: Sequence[int], tokens: Sequence[int]) -> Callable[[], object]:
        """Return one forward pass of tokens over the context's keys and values, which are computed here."""
        cache = DynamicCache()
        self._forward(torch.tensor([context]), **{self._cache_argument: cache})
        ids = torch.tensor([tokens])

        def run() -> None:
            self._forward(ids, **{self._cache_argument: cache})
            cache.crop(-len(tokens))

        return run

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=ids, logits_to_keep=1, **arguments).logits
        return logits
