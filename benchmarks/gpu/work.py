"""Work shared with a peer: prompts, their order, and the way times are taken.

Standard library only: a peer runs in a process whose packages are others, and times the same calls in the same way.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

OWN = 64  # tokens of each prompt after a shared prefix
Prompt = list[int]
Figures = Mapping[str, float | str]


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
        """Tokens of the longest request, with what it generates."""
        return max(max(self.prefixes) + OWN + 1, self.context + self.generated)

    @property
    def context(self) -> int:
        """Tokens of a prompt whose decoding is timed."""
        return self.prefixes[0] // 8

    @property
    def generated(self) -> int:
        """Tokens that such a request asks for: of every timed round, with as many to spare."""
        return 10 * self.steps


@dataclass(frozen=True)
class RequestSpec:
    """Specification sent to a peer's process.

    Attributes:
        model: Fields of the model, by the names that `ModelConfig` has for them.
        work: Work to measure.
        states: Torch's name of the dtype of the recurrent states.
        seconds: Time after which no new measurement begins.
        figures: File that figures are written to as they come.
        graphs: True if steps are replayed as CUDA graphs.
        graph_tokens: Tokens of the largest replayed step with prefills.
    """

    model: Mapping[str, object]
    work: Work
    states: str
    seconds: float
    figures: str
    graphs: bool = True
    graph_tokens: int = 512

    def write(self, path: Path) -> None:
        """Write the specification as JSON."""
        path.write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def read(cls, path: Path) -> RequestSpec:
        """Read a file that `write` has written."""
        given = json.loads(path.read_text("utf-8"))
        work = {one.name: given["work"][one.name] for one in fields(Work)}
        return cls(**{**given, "work": Work(**work)})


def prompt(length: int, vocabulary: int, seed: str) -> Prompt:
    """Token ids that depend on what is given alone."""
    return random.Random(seed).choices(range(vocabulary), k=length)


def first_tokens(
    serve: Callable[[list[Prompt]], None], wait: Callable[[], None], prefix: int, count: int, vocabulary: int
) -> dict[str, float]:
    """Milliseconds until the last of so many requests at once has its first token.

    Cold ones share nothing with anything before. The first of them are not counted: they compile what is compiled at
    first use. Warm ones share a prefix that three requests, one after the other, have begun with before.

    Args:
        serve: Takes prompts and returns when each has one token.
        wait: Returns when the device has nothing to do.
        prefix: Tokens that warm prompts share; cold ones are as long.
        count: Prompts at once.
        vocabulary: Ids that there are.
    """
    name = f"{prefix} tokens, {count} at once"
    shared = prompt(prefix, vocabulary, f"shared {prefix} {count}")

    def taken(prompts: list[Prompt]) -> float:
        wait()
        start = time.perf_counter()
        serve(prompts)
        wait()
        return 1e3 * (time.perf_counter() - start)

    def cold(turn: int) -> list[Prompt]:
        return [prompt(prefix + OWN, vocabulary, f"cold {prefix} {count} {turn} {i}") for i in range(count)]

    def warm(turn: int, requests: int) -> list[Prompt]:
        return [shared + prompt(OWN, vocabulary, f"warm {prefix} {count} {turn} {i}") for i in range(requests)]

    serve(cold(0))
    best_cold = min(taken(cold(turn)) for turn in range(1, 3 if count == 1 else 2))
    for turn in range(3):
        serve(warm(turn, 1))
    serve(warm(3, count))
    best_warm = min(taken(warm(turn, count)) for turn in (4, 5))
    found = {"cold ms": best_cold, "warm ms": best_warm, "cold over warm": best_cold / best_warm}
    return {f"{name}, {what}": value for what, value in found.items()}


def tokens_a_second(step: Callable[[], object], wait: Callable[[], None], count: int, steps: int) -> float:
    """Tokens a second of `count` decoding requests: the median of five rounds of `steps` steps, after a warm-up."""
    rates = []
    for _ in range(6):
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        rates.append(count * steps / (time.perf_counter() - start))
    return statistics.median(rates[1:])


def decode_row(count: int, how: str) -> str:
    """The name of a row of decode."""
    return f"{count} decode, {how}, tokens/s"
