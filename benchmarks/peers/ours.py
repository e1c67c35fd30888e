"""This engine among its peers, and the floor: the time that the matrix products alone would take."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from benchmarks.cases import Run, case
from benchmarks.measuring import matmul_rate
from benchmarks.models import engine, forward_flops
from benchmarks.peers.work import OWN, QUICK, Size, measure
from megatron_ext.config import CacheConfig, RequestParams, SourceConfig
from megatron_ext.mcore import platform
from megatron_ext.models.load import LoadedModel, load_model
from megatron_ext.scheduling.request import Request

CPU = torch.device("cpu")


class Ours:
    """Engine with default settings, and memory for all requests. See `benchmarks.peers.work.Peer`."""

    def __init__(self, loaded: LoadedModel, **batching: object) -> None:
        options = {"block_count": 1_600, "max_requests": 16, **batching}
        self._engine = engine(loaded, CacheConfig(snapshot_slots=64), **options)
        self._live: dict[int, tuple[int, Request, int]] = {}  # by request id: key, request, reported tokens
        self.rates: list[float] = []  # of matrix products, operations a second

    def forget(self) -> None:
        """Empty the cache, and measure the machine's rate between two workloads."""
        self._engine.core.reset_prefix_cache()
        self.rates.append(matmul_rate(torch.float32, CPU))

    def submit(self, key: int, prompt: list[int], count: int) -> None:
        """Queue a request."""
        request = self._engine.add(prompt, RequestParams(count, ignore_eos=True))
        self._live[request.request_id] = key, request, 0

    def step(self) -> Iterator[tuple[int, list[int], int, bool]]:
        """Take a step."""
        ended = {record.request_id: record for record in self._engine.step().records}
        for name, (key, request, seen) in list(self._live.items()):
            record = ended.get(name)
            tokens = list(request.generated_tokens)
            if record is not None:
                del self._live[name]
                yield key, tokens[seen:], record.skipped_prefill_token_count, True
            elif len(tokens) > seen:
                self._live[name] = key, request, len(tokens)
                yield key, tokens[seen:], 0, False


@case("latency", in_bench=True)
def ours(run: Run, model: str = "") -> None:
    """Shared prefixes, unique prompts and chats, served by this engine; times over the floor of matrix products."""
    platform.initialize()
    loaded = load_model(SourceConfig(load_hf=model), {}, device=CPU)
    peer = Ours(loaded)
    measure(run, peer)
    rate = statistics.median(peer.rates)
    run.remark(
        f"matrix products: {rate / 1e9:.0f} GFLOP/s ({min(peer.rates) / 1e9:.0f} to {max(peer.rates) / 1e9:.0f})"
    )
    for prefix in (QUICK if run.is_quick else Size()).prefixes:
        name = f"{prefix:,} shared, 1 at once"
        for kind, skipped in (("first", 0), ("later", prefix)):
            floor = 1e3 * forward_flops(loaded, [prefix + OWN], skipped) / rate
            taken = run.page["rows"][name][f"{kind} ttft, ms"]
            assert isinstance(taken, float), "it has just been measured"
            run.row(name, {f"{kind} / floor": taken / floor})
