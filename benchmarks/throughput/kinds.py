"""Prefill and decode of each kind of recurrent layer, beside transformers with the same weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.cases import Figure, Run, case
from benchmarks.measuring import matmul_rate, medians, synchronize
from benchmarks.models import SMALL, Pair, engine, jamba, mamba, nemotron_h, pair, prompts, qwen3_next
from megatron_ext.config import RequestParams
from megatron_ext.mcore import platform

NEMOTRON_H = "Mamba-2 (NemotronH)"
KINDS = {
    NEMOTRON_H: nemotron_h,
    "Mamba-1 (Mamba)": mamba,
    "Mamba-1 (Jamba)": jamba,
    "gated delta net (Qwen3-Next)": qwen3_next,
}
PREFILLS = ((1, 2048), (8, 512))
REQUESTS, PROMPT = 8, 128  # of decode


@case("throughput", in_bench=True, quick={"repeats": 1, "tokens": 4, "prefills": False})
def kinds(run: Run, repeats: int = 3, tokens: int = 64, prefills: bool = True) -> None:
    """Prefill and decode of four models beside transformers, and prefill over the floor of matrix products."""
    rate = matmul_rate(torch.float32, platform.device())
    for name, build in list(KINDS.items())[: 1 if run.is_quick else None]:
        both = pair(build)
        check_equal(both)
        for count, length in PREFILLS if prefills else ():
            found = prefill(both, count, length, repeats)
            if name == NEMOTRON_H:
                floor = SMALL.prefill_operations([length] * count) / rate
                found["time / floor"] = count * length / float(found["ours, tokens/s"] or 0) / floor
            run.row(f"{name}, prefill {count} x {length}", found)
        run.row(f"{name}, decode {REQUESTS} x {tokens}", decode(both, tokens, repeats))


@torch.inference_mode()
def check_equal(both: Pair) -> None:
    """Raise if the models have different logits, since then there is nothing to compare."""
    tokens = torch.tensor(prompts(1, 200), device=platform.device())
    ours = both.ours.model(tokens, torch.arange(200, device=tokens.device)[None], None)
    worst = (both.reference(tokens).logits - ours).abs().max().item()
    if worst > 1e-3:
        raise RuntimeError(f"the two models differ by {worst} in their logits: nothing to compare")


def _columns(tokens: int, ours: float, theirs: float) -> dict[str, Figure]:
    return {
        "ours, tokens/s": tokens / ours,
        "transformers, tokens/s": tokens / theirs,
        "ours / transformers": theirs / ours,
    }


def prefill(both: Pair, count: int, length: int, repeats: int) -> dict[str, Figure]:
    """Measure prompts up to their first tokens."""
    tokens = prompts(count, length)
    built, ids = engine(both.ours, max_tokens=count * length), torch.tensor(tokens, device=platform.device())
    works: dict[str, Callable[[], object]] = {
        "ours": lambda: built.generate(tokens, RequestParams(1)),
        "theirs": partial(_reference_prefill, both, ids),
    }
    return _columns(count * length, **medians(works, repeats))


@torch.inference_mode()
def _reference_prefill(both: Pair, ids: torch.Tensor) -> list[int]:
    """Compute the last tokens' logits and a cache to continue from."""
    output = both.reference(ids, use_cache=True, logits_to_keep=1)
    first: list[int] = output.logits[:, -1].argmax(-1).tolist()
    return first


def decode(both: Pair, tokens: int, repeats: int) -> dict[str, Figure]:
    """Measure the decode of several requests, without their prefill."""
    times = [(_our_decode(both, tokens), _reference_decode(both, tokens)) for _ in range(repeats)]
    ours, theirs = (sorted(one)[len(one) // 2] for one in zip(*times, strict=True))
    return _columns(REQUESTS * tokens, ours, theirs)


def _our_decode(both: Pair, tokens: int) -> float:
    built = engine(both.ours, max_prefills_per_step=0)
    built.start_decoding(prompts(REQUESTS, PROMPT), RequestParams(tokens + 1))
    start = time.perf_counter()
    built.drain()
    synchronize()
    return time.perf_counter() - start


def _reference_decode(both: Pair, tokens: int) -> float:
    """Return the time of transformers for all tokens less its time for the first one."""
    ids = torch.tensor(prompts(REQUESTS, PROMPT), device=platform.device())

    def generate(count: int) -> float:
        start = time.perf_counter()
        both.reference.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        synchronize()
        return time.perf_counter() - start

    generate(1)
    return generate(tokens + 1) - generate(1)
