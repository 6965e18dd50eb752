"""transformers' own `generate` over a checkpoint, greedy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.run import Run


class Transformers:
    """The model in bfloat16, experts by grouped matrix products: the fastest of its ways on a CPU."""

    def __init__(self, model: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, experts_implementation="grouped_mm"
        )
        self._model.eval()
        self.facts = {"experts_implementation": "grouped_mm", "threads": threads}

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
        """All prompts must be of one length; each step is stamped as its logits come out."""
        torch = self._torch
        ids = torch.tensor(prompts)
        stamps: list[float] = []

        def stamp(_: Any, scores: Any) -> Any:
            stamps.append(time.perf_counter())
            return scores

        with torch.inference_mode():
            began = time.perf_counter()
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                pad_token_id=0,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                logits_processor=[stamp],
            )
            total_s = time.perf_counter() - began
        times = [began, *stamps[:-1], began + total_s]
        return Run(
            tokens=out[:, ids.shape[1] :].tolist(),
            total_s=total_s,
            steps_s=np.diff(times).tolist(),
            made=[len(prompts)] * tokens,
        )

    def logits(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """float32 [prompts, vocab] after the last token of each prompt."""
        with self._torch.inference_mode():
            return self._model(self._torch.tensor(prompts)).logits[:, -1].float().numpy()

    def close(self) -> None:
        """Nothing outlives the process."""
