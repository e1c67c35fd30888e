"""This engine among its peers, and the floors: products at the machine's rate, weights at its bandwidth."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator

import torch

from benchmarks.cases import Run
from benchmarks.machine import cpu_name
from benchmarks.measuring import matmul_rate, packed_matmul_rate, read_rate
from benchmarks.models import engine
from benchmarks.peers.sizes import OWN, Size
from benchmarks.peers.work import FIRST, LATER, READ, WEIGHTS, StandardRows, shared_row, standard
from megatron_ext.config import CacheConfig, RequestParams, SourceConfig
from megatron_ext.mcore import platform
from megatron_ext.models.load import LoadedModel, load_model
from megatron_ext.scheduling.request import Request

CPU = torch.device("cpu")
PRODUCTS, PACKED = "torch.mm", "packed by oneDNN"


class Ours:
    """Engine with default settings, and memory for all requests. See `benchmarks.peers.work.Peer`."""

    def __init__(self, loaded: LoadedModel, slots: int = 64, **batching: object) -> None:
        options = {"block_count": 1_600, "max_requests": 16, **batching}
        self._engine = engine(loaded, CacheConfig(snapshot_slots=slots), **options)
        self._live: dict[int, tuple[int, Request, int]] = {}  # by request id: key, request, reported tokens

    def forget(self, shared: int = 0, *, continues: bool = False) -> None:
        """Empty the cache."""
        self._engine.core.reset_prefix_cache()

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


class OursBesideRates(Ours):
    """Engine that has memory for the work of a size, and measures the machine's rates between two rows.

    Attributes:
        rates: Operations a second of products by torch and by oneDNN, and bytes read a second.
    """

    def __init__(self, loaded: LoadedModel, size: Size, **batching: object) -> None:
        super().__init__(loaded, slots=size.work.slots, block_count=size.work.blocks, **batching)
        self.rates: defaultdict[str, list[float]] = defaultdict(list)
        self._bytes = size.shape.step_bytes

    def forget(self, shared: int = 0, *, continues: bool = False) -> None:
        """Empty the cache, and measure."""
        super().forget()
        self.rates[PRODUCTS].append(matmul_rate(torch.float32, CPU))
        packed = packed_matmul_rate()
        if packed is not None:
            self.rates[PACKED].append(packed)
        self.rates[WEIGHTS].append(read_rate(self._bytes))


@standard(reads_published=True)
def ours(run: Run, model: str, size: Size) -> None:
    """Standard rows, served by this engine, and times over the floors."""
    peer = _measured(run, model, size, "fp32")
    _report_floors(run, size, {name: statistics.median(found) for name, found in peer.rates.items()})


@standard(reads_published=True)
def ours_int8(run: Run, model: str, size: Size) -> None:
    """Standard rows, served by this engine with linear layers quantized to int8."""
    _measured(run, model, size, "fp32 and int8", cpu_weight_quantization="int8")


def _measured(run: Run, model: str, size: Size, types: str, **batching: object) -> OursBesideRates:
    """Measure the standard rows; return the engine that served them."""
    platform.initialize()
    loaded = load_model(SourceConfig(load_hf=model), {}, device=CPU)
    capability = torch.backends.cpu.get_cpu_capability()
    run.remark(f"{capability} of {cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {types}")
    peer = OursBesideRates(loaded, size, **batching)
    StandardRows(run, peer, size).measure()
    return peer


def _report_floors(run: Run, size: Size, rates: dict[str, float]) -> None:
    """Report the floors of prompts, times over them and over products by torch, and the rate of reading."""
    listed = [f"{name} {rate / 1e9:.4g} {'GB/s' if name == WEIGHTS else 'GFLOP/s'}" for name, rate in rates.items()]
    run.remark(f"rates, medians between the rows: {', '.join(listed)}")
    rows, fastest = run.page["rows"], max(rates[name] for name in (PRODUCTS, PACKED) if name in rates)
    for prefix in size.work.prefixes:
        for kind, column, skipped in (("first", FIRST, 0), ("later", LATER, prefix)):
            operations = 1e3 * size.shape.prefill_operations([prefix + OWN], skipped)
            taken = float(rows[shared_row(prefix)][column] or 0)
            ratios = {
                f"{kind} / {name}": taken * rate / operations
                for name, rate in (("floor", fastest), (PRODUCTS, rates[PRODUCTS]))
            }
            run.row(shared_row(prefix), {f"{kind} floor, ms": operations / fastest, **ratios})
    run.row(WEIGHTS, {READ: rates[WEIGHTS] / 1e9})
