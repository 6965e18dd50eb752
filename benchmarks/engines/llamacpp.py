"""llama.cpp through llama-cpp-python's low-level batch interface: all sequences advance by one token a call.

The checkpoint is converted to GGUF first, weights in bfloat16 as they are. Greedy by argmax over each row's
logits. Everything else is the library's default (flash attention by its own choice, float16 keys and values),
but for two settings that help it: the weights are read into memory rather than mapped, and the cache is no
larger than the batch needs.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.run import Run
from benchmarks.gguf_checkpoint import write_gguf

# llama.cpp's own default for rows computed in one call.
CALL_ROWS = 512
# Cells of a sequence are handed out in steps of so many.
CELLS = 256


class LlamaCppFailed(RuntimeError):
    """llama.cpp refused a model, a context or a batch; its own words are in the log of the process."""


class LlamaCpp:
    """A model of llama.cpp, and a context for as many sequences as the batch at hand has."""

    def __init__(self, model: Path, threads: int) -> None:
        import llama_cpp  # pyright: ignore[reportMissingImports]

        self._api: Any = llama_cpp
        self._threads = threads
        self._api.llama_backend_init()
        parameters = self._api.llama_model_default_params()
        parameters.use_mmap = False
        file = model / "model.gguf"
        if not file.exists():
            write_gguf(model, file.with_suffix(".partial")).rename(file)
        self._model = self._api.llama_model_load_from_file(str(file).encode(), parameters)
        if not self._model:
            raise LlamaCppFailed(f"llama.cpp does not load {model}; see its log.")
        self._vocab = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._room = (0, 0)
        self.facts = {
            "version": llama_cpp.__version__,
            "system_info": self._api.llama_print_system_info().decode().strip(" |"),
            "release_build": _is_release(Path(str(llama_cpp.__file__)).parent),
            "threads": threads,
        }

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
        """`tokens` new tokens for every prompt; each step is one llama_decode of a row for each sequence."""
        self._make_room(len(prompts), max(map(len, prompts)) + tokens)
        began = time.perf_counter()
        chosen = self._prefill(prompts).argmax(axis=1)
        times = [began, time.perf_counter()]
        made = [chosen]
        batch = self._batch(len(prompts), range(len(prompts)), wanted=True)
        positions = np.array([len(prompt) for prompt in prompts])
        for step in range(tokens - 1):
            batch.token[:] = chosen
            batch.position[:] = positions + step
            self._decode(batch)
            chosen = self._rows(range(len(prompts))).argmax(axis=1)
            made.append(chosen)
            times.append(time.perf_counter())
        batch.free()
        return Run(
            tokens=np.stack(made, axis=1).tolist(),
            total_s=times[-1] - began,
            steps_s=np.diff(times).tolist(),
            made=[len(prompts)] * tokens,
        )

    def logits(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """float32 [prompts, vocab] after the last token of each prompt."""
        self._make_room(len(prompts), max(map(len, prompts)))
        return self._prefill(prompts)

    def close(self) -> None:
        """Free the context and the model."""
        if self._context:
            self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def _make_room(self, sequences: int, length: int) -> None:
        """An empty cache for that many sequences of that length."""
        room = (sequences, -(-length // CELLS) * CELLS)
        if self._room == room:
            self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
            return
        if self._context:
            self._api.llama_free(self._context)
        parameters = self._api.llama_context_default_params()
        parameters.n_seq_max = sequences
        parameters.n_ctx = room[0] * room[1]
        parameters.n_batch = parameters.n_ubatch = CALL_ROWS
        parameters.n_threads = parameters.n_threads_batch = self._threads
        self._context = self._api.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise LlamaCppFailed(f"llama.cpp makes no context for {room[0]} sequences of {room[1]} tokens.")
        self._room = room

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """float32 [prompts, vocab] after each prompt; whole prompts share a call as far as they fit."""
        last = np.empty((len(prompts), self._vocab), np.float32)
        rows = [
            (sequence, place, token, place == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        for start in range(0, len(rows), CALL_ROWS):
            part = rows[start : start + CALL_ROWS]
            batch = self._batch(len(part), [row[0] for row in part], wanted=False)
            batch.token[:] = [row[2] for row in part]
            batch.position[:] = [row[1] for row in part]
            batch.wanted[:] = [row[3] for row in part]
            self._decode(batch)
            ends = [number for number, row in enumerate(part) if row[3]]
            if ends:
                last[[part[number][0] for number in ends]] = self._rows(ends)
            batch.free()
        return last

    def _batch(self, rows: int, sequences: Sequence[int], wanted: bool) -> _Batch:
        return _Batch(self._api, rows, sequences, wanted)

    def _decode(self, batch: _Batch) -> None:
        status = self._api.llama_decode(self._context, batch.native)
        if status:
            raise LlamaCppFailed(f"llama_decode returned {status} for {len(batch.token)} rows.")

    def _rows(self, rows: Sequence[int]) -> np.ndarray:
        """float32 [rows, vocab]: logits of those rows of the last batch."""
        pointers = [self._api.llama_get_logits_ith(self._context, row) for row in rows]
        return np.stack([np.ctypeslib.as_array(pointer, (self._vocab,)) for pointer in pointers])


class _Batch:
    """A llama_batch, its fields as arrays; sequence numbers are written once."""

    def __init__(self, api: Any, rows: int, sequences: Sequence[int], wanted: bool) -> None:
        self._api = api
        self.native = api.llama_batch_init(rows, 0, 1)
        self.native.n_tokens = rows
        self.token = np.ctypeslib.as_array(self.native.token, (rows,))
        self.position = np.ctypeslib.as_array(self.native.pos, (rows,))
        self.wanted = np.ctypeslib.as_array(ctypes.cast(self.native.logits, _BYTES), (rows,))
        self.wanted[:] = wanted
        for row, sequence in enumerate(sequences):
            self.native.n_seq_id[row] = 1
            self.native.seq_id[row][0] = sequence

    def free(self) -> None:
        self._api.llama_batch_free(self.native)


_BYTES = ctypes.POINTER(ctypes.c_int8)


def _is_release(package: Path) -> bool:
    """Whether the compiled kernels carry no assertions, as CMake's Release build (-O3 -DNDEBUG) leaves them."""
    return all(b"__assert_fail" not in file.read_bytes() for file in package.glob("lib/libggml-cpu.so"))
