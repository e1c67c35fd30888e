"""Operators of CPUs: recurrent layers, attention over the block table, and sampling, by each backend in turns.

With one thread times are CPU time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.cases import Figure, Run, case
from benchmarks.measuring import fastest
from benchmarks.operators.calls import BLOCK, TINY, Calls, Sizes
from megatron_ext.ops import triton
from megatron_ext.ops.backends import preferring
from megatron_ext.ops.cpp import NAME as CPP
from megatron_ext.ops.paged_attention import PAGED_ATTENTION, build_paged_batch, paged_attention
from megatron_ext.ops.sampling import SAMPLING, sample_tokens, sampling_metadata

CPU = torch.device("cpu")
ROWS = 64  # of logits
# Sizes of the small models: 8 requests, a prefill of 64 tokens.
SMALL = Sizes(
    tokens=64,
    requests=8,
    heads=16,
    head_dim=32,
    groups=2,
    states=64,
    layers=4,
    scan_channels=512,
    key_heads=8,
    value_heads=16,
    delta_dim=32,
    queries=8,
    keys=2,
    channels=32,
    words=4_096,
)


@case("operators", quick={"repeats": 1})
def layers(run: Run, repeats: int = 9) -> None:
    """Operators of layers at the sizes of small models: C++ beside plain torch, prefill and decode."""
    calls = Calls(TINY if run.is_quick else SMALL, torch.float32, CPU).all()
    large = replace(SMALL, heads=64, head_dim=64, states=128)
    more = {} if run.is_quick else Calls(large, torch.float32, CPU).ssd()
    for name, make in (calls | {f"{name}, 64 heads of 64": make for name, make in more.items()}).items():
        call = make()
        if not call.has_reference or "copy" in name:
            continue
        times = fastest({backend: _preferring(backend, call.work) for backend in (CPP, "reference")}, repeats)
        ours, plain = times[CPP], times["reference"]
        run.row(name, {"C++, ms": 1e3 * ours, "plain torch, ms": 1e3 * plain, "plain torch / C++": plain / ours})


def _preferring(backend: str, work: Callable[[], object]) -> Callable[[], object]:
    @torch.inference_mode()
    def call() -> object:
        with preferring(backend):
            return work()

    return call


def _backends(names: Sequence[str]) -> list[str]:
    """Return the backends of CPUs, the preferred one first."""
    return [name for name in names if name != triton.NAME]


STEPS = {  # (queries, keys) of each sequence
    "cold prefill of 2,176": [(2176, 2176)],
    "128 after 2,048": [(128, 2176)],
    "128 after 8,192": [(128, 8320)],
    "decode of 8 at 128": [(1, 128)] * 8,
    "decode of 8 at 2,048": [(1, 2048)] * 8,
    "decode of 8 at 8,192": [(1, 8192)] * 8,
    "decode of 8 at 32,768": [(1, 32768)] * 8,
}


@case("operators", in_bench=True, quick={"repeats": 1})
@torch.inference_mode()
def attention(run: Run, repeats: int = 9, heads: tuple = (8, 2, 32)) -> None:
    """Attention of one layer over the block table; heads: query heads, key heads, channels of a head.

    The last column compares with the time to read the keys and values once, in order.
    """
    query_heads, key_heads, channels = heads
    numbers = torch.randn(2**20 if run.is_quick else 2**25)
    bandwidth = numbers.nbytes / fastest({"sum": numbers.sum}, repeats)["sum"]  # bytes/s
    for step, sequences in list(STEPS.items())[3:6] if run.is_quick else STEPS.items():
        queries, keys = zip(*sequences, strict=True)
        counts = [-(-length // BLOCK) for length in keys]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
        tables = [[order.pop() for _ in range(count)] for count in counts]
        caches = [torch.randn(sum(counts), BLOCK, key_heads, channels) for _ in range(2)]
        batch = build_paged_batch(tables, queries, keys, sum(length == 1 for length in queries), BLOCK, "cpu")
        q = torch.randn(sum(queries), query_heads, channels)

        def attend(name: str, q: Tensor = q, caches: list[Tensor] = caches, batch: object = batch) -> Tensor:
            with PAGED_ATTENTION.forced(name):
                return paged_attention(q, *caches, batch, scale=q.shape[-1] ** -0.5)

        names = _backends(PAGED_ATTENTION.names)
        times = fastest({name: lambda name=name, call=attend: call(name) for name in names}, repeats)
        found: dict[str, Figure] = {f"{name}, ms": 1e3 * seconds for name, seconds in times.items()}
        reading = 2 * sum(keys) * key_heads * channels * q.element_size() / bandwidth
        found |= {f"{names[0]} / {names[-1]}": times[names[0]] / times[names[-1]]}
        run.row(step, {**found, f"{names[0]} / reading": times[names[0]] / reading})


LOGITS = {"like a model's": 2.0, "nearly flat": 0.3, "peaked": 6.0}  # their standard deviation
FILTERS: dict[str, dict[str, float]] = {
    "no filter": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50 and top_p 0.9": {"top_k": 50, "top_p": 0.9},
}


@case("operators", in_bench=True, quick={"repeats": 1, "vocabularies": (4_096,)})
@torch.inference_mode()
def sampling(run: Run, repeats: int = 9, vocabularies: tuple = (4_096, 32_000, 131_072)) -> None:
    """Drawing 64 tokens, in softmaxes over the same logits; the preferred backend, the worst of three shapes."""
    names = _backends(SAMPLING.names)
    for vocabulary in vocabularies:
        worst: dict[str, Figure] = {}
        for deviation in LOGITS.values():
            logits = torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(1)) * deviation
            room = torch.empty_like(logits)  # no page of it is new
            works: dict[tuple[str, str], Callable[[], Tensor]] = {
                ("softmax", ""): lambda logits=logits, room=room: torch.softmax(logits, -1, out=room)
            }
            for name, options in FILTERS.items():
                works |= {(name, backend): _draw(logits, backend, **options) for backend in names}
            times = fastest(works, repeats)
            softmax = times.pop(("softmax", ""))
            for (name, backend), seconds in times.items():
                column = f"{name}, softmaxes" if backend == names[0] else f"{name}, {backend}, softmaxes"
                worst[column] = max(float(worst.get(column) or 0.0), seconds / softmax)
        run.row(f"{ROWS} x {vocabulary:,}", worst)


def _draw(logits: Tensor, backend: str, top_k: float = 0, top_p: float = 0.0) -> Callable[[], Tensor]:
    uniform = torch.rand(ROWS, generator=torch.Generator().manual_seed(2), dtype=torch.float64).tolist()
    batch = sampling_metadata([0.8] * ROWS, [int(top_k)] * ROWS, [top_p] * ROWS, uniform)

    def call() -> Tensor:
        with SAMPLING.forced(backend):
            return sample_tokens(logits, batch)

    return call
