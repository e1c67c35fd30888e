"""Speed: times to the first token, decode rates, and the share of decode time in which the device idles."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.device_time import idle_share
from benchmarks.gpu.notes import Notes
from benchmarks.gpu.phases import phases_of
from benchmarks.gpu.shapes import BLOCK, engine_for, filled_model, longest
from benchmarks.gpu.work import Figures, Prompt, Work, decode_row, first_tokens, prompt, tokens_a_second
from benchmarks.measuring import synchronize
from megatron_ext.config import ModelConfig, RequestParams
from megatron_ext.mcore.adapter import InferenceEngine

FIRST = RequestParams(num_tokens_to_generate=1, ignore_eos=True)
HOW = {"graphs": "local", "eager": "none"}


class Speed:
    """Speed measurements of one model.

    Args:
        config: Shape of the model.
        work: Amount of work.
        device: Device that computes.
        notes: Receives the figures.
    """

    def __init__(self, config: ModelConfig, work: Work, device: torch.device, notes: Notes) -> None:
        self._config, self._work, self._notes = config, work, notes
        self._dtype = getattr(torch, work.dtype)
        start = time.perf_counter()
        self._model = filled_model(config, self._dtype, device)
        synchronize()
        notes.tell("model made in s", time.perf_counter() - start)
        notes.tell("billions of parameters", sum(one.numel() for one in self._model.parameters()) / 1e9)

    def measure(self) -> None:
        """Run the measurements, the most telling ones first."""
        work, notes = self._work, self._notes
        for how in HOW:
            for count in work.decodes:
                notes.attempt(f"{count} decode, {how}", partial(self.decode, count, how), like="decode")
        for prefix in work.prefixes:
            for count in work.counts:
                piece = partial(self.first_tokens, prefix, count)
                notes.attempt(f"{prefix} tokens, {count} at once", piece, like=f"{prefix}")
        if torch.cuda.is_available():
            notes.tell("most memory, GiB", torch.cuda.max_memory_allocated() / 2**30)

    def first_tokens(self, prefix: int, count: int) -> Figures:
        """Cold and warm; steps that are small enough are computed by programs where one request comes at a time."""
        graphs = {"cuda_graph_impl": "local"} if count == 1 else {}
        engine = self._engine(count, longest(prefix), **graphs)
        try:
            serve = partial(_serve, engine)
            return first_tokens(serve, synchronize, prefix, count, self._work.vocabulary)
        finally:
            _end(engine)

    def decode(self, count: int, how: str) -> Figures:
        """Tokens a second of so many requests, the device's idle share, and where the host's time goes."""
        work, start = self._work, time.perf_counter()
        engine = self._engine(count, work.context + work.generated, slots=2, cuda_graph_impl=HOW[how])
        made = time.perf_counter() - start
        try:
            self._begin(engine, count)
            step, steps = engine.core.step, work.steps
            rate, few = tokens_a_second(step, synchronize, count, steps), max(1, steps // 2)
            self._notes.tell(decode_row(count, how), rate)  # whatever comes of the rest
            rows: dict[str, float | str] = {
                f"{count} decode, {how}, device idle": idle_share(partial(_repeat, step, few))
            }
            if how == "graphs":
                rows[f"{count} decode, graphs, engine made in s"] = made
                rows |= {f"{count} decode, {name}": ms for name, ms in phases_of(step, few).items()}
            return rows
        finally:
            _end(engine)

    def _begin(self, engine: InferenceEngine, count: int) -> None:
        work = self._work
        row_metadata = RequestParams(num_tokens_to_generate=work.generated, ignore_eos=True)
        for number in range(count):
            engine.add_request(number, prompt(work.context, work.vocabulary, f"decode {number}"), row_metadata)
        while any(not engine.get_request(number).is_decoding for number in range(count)):
            engine.step_modern()

    def _engine(self, requests: int, length: int, slots: int = 8, **batching: object) -> InferenceEngine:
        """All of them take requests of the same longest length, as the peer's one engine does."""
        most = self._work.longest + BLOCK
        return engine_for(
            self._model, self._config, self._dtype, requests, length, slots, max_sequence_length=most, **batching
        )


def _serve(engine: InferenceEngine, prompts: list[Prompt]) -> None:
    engine.generate(prompts, FIRST)


def _repeat(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()


def _end(engine: InferenceEngine) -> None:
    """Free the engine's pools and graphs, so that the next engine finds room."""
    engine.suspend()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
