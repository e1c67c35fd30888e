"""Cost of a step of 64 decoding requests with a model too small to count: the host's part of every step.

Run: `python -m benchmarks.decode_step`. CPU time, one thread, random weights, prefix caching on. It uses nothing but
the engine's public names, so that an older checkout can be measured by the same file in the same minute:
`PYTHONPATH=OLDER python benchmarks/decode_step.py`. Compare figures of one run, or of runs that took turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from megatron_ext.config import BatchingConfig, ModelConfig, RequestParams
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.build import build_model

REQUESTS = 64
VOCABULARY = 97
LENGTHS = (100, 2_000)  # tokens of a prompt
KINDS = {"plain": {}, "stop words": {"stop_words": ("no such text",)}, "log-probs": {"return_log_probs": True}}
MODEL = ModelConfig(
    hybrid_override_pattern="M*",
    hidden_size=32,
    num_attention_heads=2,
    mamba_state_dim=8,
    mamba_head_dim=8,
    mamba_num_groups=1,
    vocab_size=VOCABULARY,
)


class Ids:
    """Token ids as text."""

    eod = bos = None
    vocab_size = VOCABULARY

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text such as "1 2"."""
        return [int(word) for word in text.split()]

    def detokenize(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Join ids with spaces: the inverse of `tokenize`."""
        return " ".join(map(str, ids))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    model = build_model(MODEL, device=torch.device("cpu"))
    table = Table("prompt, tokens", "requests ask for", "fastest step, ms", "median, ms")
    for length in LENGTHS:
        for kind, params in KINDS.items():
            times = step_times(model, length, steps, params)
            row = (f"{length:,}", kind, f"{min(times) * 1e3:.2f}", f"{statistics.median(times) * 1e3:.2f}")
            table.add_row(*row)
    Console(highlight=False).print(table)


def step_times(model: torch.nn.Module, length: int, steps: int, params: dict[str, object]) -> list[float]:
    """CPU seconds of steps in which every request decodes."""
    batching = BatchingConfig(block_size=16, block_count=REQUESTS * (length // 16 + 20), max_requests=REQUESTS)
    engine = build_engine(model, MODEL, Ids(), batching, dtype=torch.float32)
    source = random.Random(length)
    settings = RequestParams(num_tokens_to_generate=steps + 2 * REQUESTS, skip_prompt_log_probs=True, **params)
    for request_id in range(REQUESTS):
        engine.add_request(request_id, [source.randrange(VOCABULARY) for _ in range(length)], settings)
    while any(engine.get_request(request_id).generated_count == 0 for request_id in range(REQUESTS)):
        engine.step_modern()
    times = []
    for _ in range(steps):
        start = time.process_time()
        engine.step_modern()
        times.append(time.process_time() - start)
    engine.suspend()
    return times


if __name__ == "__main__":
    main()
