"""Work shared with a peer: amounts, times to first tokens, and decode rates.

Standard library only: a peer runs in a process whose packages are others, and times the same calls in the same way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cases import Run, token_ids

OWN = 64  # tokens of each prompt after a shared prefix
Prompt = list[int]
# Shape of the measured Mamba-2 hybrid of 2 billion parameters: fields of `ModelConfig`.
LARGE: Mapping[str, Any] = {
    "hybrid_override_pattern": "M-M-M-M*-" * 5,
    "hidden_size": 2560,
    "ffn_hidden_size": 10_240,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 128,
    "mamba_state_dim": 128,
    "mamba_head_dim": 64,
    "mamba_num_heads": 80,
    "mamba_num_groups": 8,
    "squared_relu": True,
    "vocab_size": 32_000,
    "max_position_embeddings": 65_536,
}
SMALL: Mapping[str, Any] = {
    **LARGE,
    "hybrid_override_pattern": "M-M*-",
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 32,
    "mamba_state_dim": 32,
    "mamba_head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_num_groups": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Work:
    """Amount of work.

    Attributes:
        dtype: Torch's name of the dtype of weights and inputs.
        prefixes: Tokens that prompts share.
        counts: Numbers of prompts that arrive at once.
        decodes: Numbers of requests that decode at once.
        steps: Decode steps per timed round.
        vocabulary: Number of token ids.
    """

    dtype: str = "bfloat16"
    prefixes: Sequence[int] = (8192, 32_768)
    counts: Sequence[int] = (1, 8)
    decodes: Sequence[int] = (1, 8, 64)
    steps: int = 32
    vocabulary: int = 32_000

    @property
    def longest(self) -> int:
        """Tokens of the longest request, with its output."""
        return max(max(self.prefixes) + OWN + 1, self.context + self.generated)

    @property
    def context(self) -> int:
        """Tokens of a prompt whose decoding is timed."""
        return self.prefixes[0] // 8

    @property
    def generated(self) -> int:
        """Tokens that such a request generates: of every timed round, with as many to spare."""
        return 10 * self.steps

    def decode_prompts(self, count: int) -> list[Prompt]:
        """Return prompts of requests whose decoding is timed."""
        return [token_ids(self.context, f"decode {i}", self.vocabulary) for i in range(count)]


WORK = Work()
QUICK = Work("float32", (256, 512), (1, 2), (1, 2), 2, 512)


def first_tokens(
    run: Run,
    serve: Callable[[list[Prompt]], object],
    wait: Callable[[], None],
    prefix: int,
    count: int,
    vocabulary: int,
) -> None:
    """Report the milliseconds until the last of `count` requests at once has its first token, cold and warm.

    Cold ones share nothing with any earlier one. The first of them are not counted: they compile the kernels. Warm ones
    share a prefix with which three requests, one after the other, have begun.

    Args:
        run: Receives the row.
        serve: Takes prompts and returns when each has one token.
        wait: Returns when the device is idle.
        prefix: Tokens that warm prompts share; cold ones are as long.
        count: Prompts at once.
        vocabulary: Number of token ids.
    """
    shared = token_ids(prefix, f"shared {prefix} {count}", vocabulary)

    def prompts(kind: str, turn: int, requests: int) -> list[Prompt]:
        beginning, own = (shared, OWN) if kind == "warm" else ([], prefix + OWN)
        names = [f"{kind} {prefix} {count} {turn} {i}" for i in range(requests)]
        return [beginning + token_ids(own, name, vocabulary) for name in names]

    def taken(asked: list[Prompt]) -> float:
        wait()
        start = time.perf_counter()
        serve(asked)
        wait()
        return 1e3 * (time.perf_counter() - start)

    serve(prompts("cold", 0, count))
    cold = min(taken(prompts("cold", turn, count)) for turn in range(1, 3 if count == 1 else 2))
    for turn in range(3):
        serve(prompts("warm", turn, 1))
    serve(prompts("warm", 3, count))
    warm = min(taken(prompts("warm", turn, count)) for turn in (4, 5))
    row = f"{prefix} tokens, {count} at once"
    run.row(row, {"cold ms": cold, "warm ms": warm, "cold over warm": cold / warm})


def tokens_a_second(step: Callable[[], object], wait: Callable[[], None], count: int, steps: int) -> float:
    """Return tokens a second of `count` decoding requests: the median of five rounds, after one that warms up."""
    rates = []
    for _ in range(6):
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        rates.append(count * steps / (time.perf_counter() - start))
    return statistics.median(rates[1:])
