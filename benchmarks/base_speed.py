"""Cold speed: prefill and decode beside transformers with the same weights, and beside the matrix-product floor.

Run: `python -m benchmarks.base_speed`. Compare figures of one run only.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import header, matmul_rate, seconds, synchronize
from benchmarks.nemotron_shaped import VOCABULARY, Pair, build_pair, forward_flops
from megatron_ext.config import RequestParams
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine

DECODE_REQUESTS, DECODE_PROMPT, DECODE_TOKENS = 8, 128, 64
MIXED_PROMPT, MIXED_CHUNK = 1000, 128


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    device = platform.device()
    console = Console(highlight=False)
    pair = build_pair(device, dtype)
    check_equal(pair)
    console.print(header(device, dtype), markup=False)
    rate = matmul_rate(dtype, device)
    console.print(f"matrix products: {rate / 1e9:.0f} GFLOP/s")
    console.print(prefill_table(pair, rate))
    console.print(decode_table(pair))
    console.print(mixed_table(pair))
    platform.shut_down()


def prompts(count: int, length: int) -> torch.Tensor:
    """Random token ids [count, length] of a fixed seed."""
    return torch.randint(VOCABULARY, (count, length), generator=torch.Generator().manual_seed(length))


@torch.inference_mode()
def check_equal(pair: Pair) -> None:
    """Figures of different answers would mean nothing."""
    device = next(pair.ours.model.parameters()).device
    tokens = prompts(1, 200).to(device)
    reference = pair.reference(tokens).logits.float()
    ours = pair.ours.model(tokens, torch.arange(200, device=device)[None], None).float()
    tolerance = 1e-3 if pair.ours.dtype is torch.float32 else 0.3
    worst = (reference - ours).abs().max().item()
    if worst > tolerance:
        raise RuntimeError(f"the two models differ by {worst} in their logits: nothing to compare")


def prefill_table(pair: Pair, rate: float) -> Table:
    """Prompt tokens a second, first token included."""
    table = Table("prefill", "ours, tokens/s", "transformers, tokens/s", "ours / transformers", "time / floor")
    for count, length in ((1, 2048), (8, 512)):
        tokens = prompts(count, length)
        total = count * length
        engine = pair.engine(max_tokens=max(total, 64))
        ours = seconds(lambda engine=engine, tokens=tokens: engine.generate(tokens.tolist(), RequestParams(1)))
        theirs = seconds(lambda tokens=tokens: reference_prefill(pair, tokens))
        floor = forward_flops(pair.ours, [length] * count) / rate
        row = (f"{total / ours:.0f}", f"{total / theirs:.0f}", f"{theirs / ours:.2f}", f"{ours / floor:.2f}")
        table.add_row(f"{count} x {length}", *row)
    return table


@torch.inference_mode()
def reference_prefill(pair: Pair, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the last tokens, with a cache to go on from."""
    device = next(pair.reference.parameters()).device
    output = pair.reference(tokens.to(device), use_cache=True, logits_to_keep=1)
    return output.logits[:, -1].argmax(-1).tolist()


def decode_table(pair: Pair) -> Table:
    """Generated tokens a second, prefill not counted."""
    table = Table("decode", "ours, tokens/s", "transformers, tokens/s", "ours / transformers")
    ours, theirs = median_decode_seconds(pair)
    total = DECODE_REQUESTS * DECODE_TOKENS
    name = f"{DECODE_REQUESTS} requests x {DECODE_TOKENS}"
    table.add_row(name, f"{total / ours:.0f}", f"{total / theirs:.0f}", f"{theirs / ours:.2f}")
    return table


def median_decode_seconds(pair: Pair) -> tuple[float, float]:
    """Ours and transformers', of three runs each in turn."""
    runs = [(our_decode_seconds(pair), reference_decode_seconds(pair)) for _ in range(3)]
    ours, theirs = (statistics.median(times) for times in zip(*runs, strict=True))
    return ours, theirs


def our_decode_seconds(pair: Pair) -> float:
    """Seconds for the decode steps after the one that prefilled."""
    engine = pair.engine()
    for request_id, tokens in enumerate(prompts(DECODE_REQUESTS, DECODE_PROMPT).tolist()):
        engine.add_request(request_id, tokens, RequestParams(DECODE_TOKENS + 1))
    engine.step_modern()
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step_modern()
    synchronize()
    return time.perf_counter() - start


def reference_decode_seconds(pair: Pair) -> float:
    """Decode seconds of transformers' generate: its time for all tokens less its time for the first."""
    device = next(pair.reference.parameters()).device
    tokens = prompts(DECODE_REQUESTS, DECODE_PROMPT).to(device)

    def generate(count: int) -> float:
        start = time.perf_counter()
        pair.reference.generate(tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        synchronize()
        return time.perf_counter() - start

    generate(1)
    return generate(DECODE_TOKENS + 1) - generate(1)


def mixed_table(pair: Pair) -> Table:
    """Table of what a chunked prefill costs the requests that decode in the same steps."""
    engine = pair.engine(max_tokens=DECODE_REQUESTS + MIXED_CHUNK, max_requests=DECODE_REQUESTS + 1)
    for request_id, tokens in enumerate(prompts(DECODE_REQUESTS, DECODE_PROMPT).tolist()):
        engine.add_request(request_id, tokens, RequestParams(200))
    while not all(request.is_decoding for request in engine.scheduler.queues.running) or engine.step_count < 4:
        engine.step_modern()
    alone = [step_seconds(engine) for _ in range(24)]
    engine.add_request(DECODE_REQUESTS, prompts(1, MIXED_PROMPT)[0].tolist(), RequestParams(1))
    mixed = []
    while DECODE_REQUESTS in engine.waiting_request_ids or any(
        not request.is_decoding for request in engine.scheduler.queues.running
    ):
        mixed.append(step_seconds(engine))
    table = Table("step of 8 decoding requests", "median ms", "steps")
    table.add_row("alone", f"{statistics.median(alone) * 1e3:.1f}", str(len(alone)))
    name = f"beside {MIXED_CHUNK} prefill tokens"
    table.add_row(name, f"{statistics.median(mixed) * 1e3:.1f}", str(len(mixed)))
    return table


def step_seconds(engine: InferenceEngine) -> float:
    """Duration of one step."""
    start = time.perf_counter()
    engine.step_modern()
    synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
