"""CPU time of a step of 64 decoding requests with a model too small to count: the host's part of every step.

`python -m benchmarks latency.decode_step` measures this checkout. The file uses nothing but public names of the engine,
so that it can measure an older checkout, too, in turns with this one: `PYTHONPATH=OLDER python
benchmarks/decode_step.py`. One thread, random weights, prefix caching on.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator

import torch

from megatron_ext.config import BatchingConfig, ModelConfig, RequestParams
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.build import build_model
from megatron_ext.text.tokenizer import NullTokenizer

REQUESTS, VOCABULARY = 64, 97
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


def measure(steps: int, lengths: tuple[int, ...] = LENGTHS) -> Iterator[tuple[str, list[float]]]:
    """Measure prompts of each length, for each kind of request.

    Yields:
        Name, and the CPU seconds of steps in which every request decodes.
    """
    torch.set_num_threads(1)
    model = build_model(MODEL, device=torch.device("cpu"))
    for length in lengths:
        for kind, params in KINDS.items():
            yield f"{length:,} tokens, {kind}", step_seconds(model, length, steps, params)


def step_seconds(model: torch.nn.Module, length: int, steps: int, params: dict[str, object]) -> list[float]:
    """Return the CPU seconds of steps in which every request decodes."""
    batching = BatchingConfig(block_size=16, block_count=REQUESTS * (length // 16 + 20), max_requests=REQUESTS)
    engine = build_engine(model, MODEL, NullTokenizer(VOCABULARY), batching, dtype=torch.float32)
    step = engine.core.step if hasattr(engine, "core") else engine.step_modern
    source = random.Random(length)
    settings = RequestParams(num_tokens_to_generate=steps + 2 * REQUESTS, skip_prompt_log_probs=True, **params)
    for request_id in range(REQUESTS):
        engine.add_request(request_id, [source.randrange(VOCABULARY) for _ in range(length)], settings)
    while any(engine.get_request(request_id).generated_count == 0 for request_id in range(REQUESTS)):
        step()
    times = []
    for _ in range(steps):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    engine.suspend()
    return times


if __name__ == "__main__":
    for name, taken in measure(60):
        print(f"{name}: fastest {1e3 * min(taken):.2f} ms, median {1e3 * statistics.median(taken):.2f} ms")
