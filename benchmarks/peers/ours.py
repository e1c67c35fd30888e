"""This engine. Run by `benchmarks.peers.compare`: `python -m benchmarks.peers.ours MODEL OUT THREADS [quick]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.peers.work import QUICK, Size, run
from megatron_ext.config import BatchingConfig, CacheConfig, RequestParams, SourceConfig
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.load import load_model

BLOCKS, SLOTS, REQUESTS = 1_600, 64, 16


class Ours:
    """An engine with default settings beside room for all."""

    def __init__(self, model: str) -> None:
        self._loaded = load_model(SourceConfig(load_hf=model), {}, device=torch.device("cpu"))
        batching = BatchingConfig(block_count=BLOCKS, max_requests=REQUESTS)
        one, cache = self._loaded, CacheConfig(snapshot_slots=SLOTS)
        self._engine = build_engine(one.model, one.config, one.tokenizer, batching, cache, dtype=one.dtype)
        self._reported: dict[int, int] = {}

    def forget(self) -> None:
        """See `Peer`."""
        self._engine.reset_prefix_cache()

    def submit(self, key: int, prompt: list[int], count: int) -> None:
        """See `Peer`."""
        self._engine.add_request(key, prompt, RequestParams(count, ignore_eos=True))
        self._reported[key] = 0

    def step(self) -> Iterator[tuple[int, list[int], int, bool]]:
        """See `Peer`."""
        ended = {one.request_id: one for one in self._engine.step_modern()["finished_request_records"]}
        for key, seen in list(self._reported.items()):
            record = ended.get(key)
            tokens = list((record or self._engine.get_request(key)).generated_tokens)
            if len(tokens) == seen and record is None:
                continue
            self._reported[key] = len(tokens)
            if record is not None:
                del self._reported[key]
            yield key, tokens[seen:], record.skipped_prefill_token_count if record else 0, record is not None


if __name__ == "__main__":
    model, out, threads, *rest = sys.argv[1:]
    torch.set_num_threads(int(threads))
    run(Ours(model), QUICK if rest else Size(), Path(out), peer="ours", torch=torch.__version__)
