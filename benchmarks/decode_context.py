"""Step of 8 decoding requests after short and long contexts, in one process and taking turns.

Run: `python -m benchmarks.decode_context`. Nothing is shared between the requests, so that a step reads all their keys.
"""

from __future__ import annotations

import argparse
import random
import statistics

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.base_speed import step_seconds
from benchmarks.measuring import header, keep_figures, part_arguments
from benchmarks.nemotron_shaped import VOCABULARY, Pair, build_pair
from megatron_ext.config import RequestParams
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine

CONTEXTS = (128, 2_048, 8_192)
QUICK = (128, 256)
REQUESTS, BLOCK = 8, 64
ROUNDS, TURN = 6, 8  # steps of a turn


def main() -> None:
    """Measure and print."""
    options = part_arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    found = measure(options)
    base = next(iter(found.values()))
    table = Table("context, tokens", f"step of {REQUESTS}, ms", "beside the shortest")
    for context, seconds in found.items():
        table.add_row(f"{context:,}", f"{1e3 * seconds:.2f}", f"{seconds / base:.2f}")
    console = Console(highlight=False)
    console.print(header(platform.device(), torch.float32), markup=False)
    console.print(table)
    keep_figures(options, found)
    platform.shut_down()


def measure(options: argparse.Namespace) -> dict[int, float]:
    """Median seconds of a step by context."""
    pair = build_pair(platform.device(), torch.float32)
    contexts, rounds = (QUICK, 1) if options.quick else (CONTEXTS, ROUNDS)
    steps = (rounds + 1) * TURN
    engines = {context: decoding(pair, context, steps) for context in contexts}
    times: dict[int, list[float]] = {context: [] for context in contexts}
    for turn in range(rounds + 1):
        for context, engine in engines.items():
            taken = [step_seconds(engine) for _ in range(TURN)]
            times[context] += taken if turn else []  # the first one warms up
    return {context: statistics.median(taken) for context, taken in times.items()}


def decoding(pair: Pair, context: int, steps: int) -> InferenceEngine:
    """An engine whose requests have had their prompts computed, and decode for so many steps more."""
    blocks = REQUESTS * (-(-(context + steps) // BLOCK) + 2)
    engine = pair.engine(block_size=BLOCK, block_count=blocks, max_requests=REQUESTS)
    source = random.Random(context)
    for request_id in range(REQUESTS):
        tokens = [source.randrange(8, VOCABULARY) for _ in range(context)]
        engine.add_request(request_id, tokens, RequestParams(steps + 4 * REQUESTS + context // 64, ignore_eos=True))
    while any(not engine.get_request(request_id).is_decoding for request_id in range(REQUESTS)):
        engine.step_modern()
    return engine


if __name__ == "__main__":
    main()
