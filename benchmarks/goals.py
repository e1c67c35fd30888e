"""The goals of speed, each as met or missed by how much, from the figures of one run. Standard library only.

`benchmarks.bench` collects the figures: by part, what its benchmark wrote. A goal whose figures are not there (vLLM is
not installed, a part failed) is listed as not measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Figures = Mapping[str, Any]

VLLM_COLD, VLLM_LATER, VLLM_CHAT, VLLM_UNIQUE = 0.8, 1.0, 0.9, 1.0
VLLM_TOGETHER = (1.3, 1.1)  # after the shorter and the longer prefix, as the next
WARM_FLOOR = (2.2, 2.0)
COLD_FLOOR, DECODE_CONTEXT, DECODE_KIND, CACHE_ON_OFF = 1.5, 1.5, 1.4, 0.99
CHAT_TOKENS = 6_800  # of 19,072, in eight conversations of four turns; this one must hold
HOST_COLD, HOST_CACHED, HOST_STEP = 2.0, 1.5, 1.5
DRAFTS_REPEATING, DRAFTS_ANYWHERE = 1.8, 0.98
SAMPLING = {"neither": 2.0, "top_p 0.9": 8.0}
SAMPLING_WORDS = ("32000", "131072")


@dataclass(frozen=True)
class Goal:
    """A figure that is to be reached.

    Attributes:
        name: Measured quantity and its reference.
        measured: None if it was not.
        bound: The goal.
        is_upper_bound: True if smaller is better.
    """

    name: str
    measured: float | None
    bound: float
    is_upper_bound: bool = True

    def verdict(self) -> str:
        """Met, or missed by how much."""
        if self.measured is None:
            return "not measured"
        is_met = self.measured <= self.bound if self.is_upper_bound else self.measured >= self.bound
        factor = self.measured / self.bound if self.is_upper_bound else self.bound / self.measured
        return "met" if is_met else f"missed by {100 * (factor - 1):.0f} %"


def goals(results: Mapping[str, Figures], prefixes: Sequence[int]) -> Iterator[Goal]:
    """All of them.

    Args:
        results: Figures by part.
        prefixes: Tokens that prompts share, the shorter first.
    """
    for place, prefix in enumerate(prefixes):
        yield from _of_prefix(results, prefix, place)
    yield from _of_peers(results)
    yield from _of_ourselves(results)
    yield from _of_the_host(results)
    yield from _of_drafts(results)


def _of_prefix(results: Mapping[str, Figures], prefix: int, place: int) -> Iterator[Goal]:
    alone, together = f"shared {prefix}, 1 at once", f"shared {prefix}, 8 at once"
    floor = f"{prefix:,} shared, 1 at once"
    cold, warm = (
        _get(results, "ours", "floor", str(prefix), "cold"),
        _get(results, "ours", "floor", str(prefix), "warm"),
    )
    first, later = _get(results, "ours", alone, "first_ttft"), _get(results, "ours", alone, "later_ttft")
    yield Goal(f"{floor}: cold ttft / vLLM's", _beside(results, alone, "first_ttft"), VLLM_COLD)
    yield Goal(f"{floor}: cold ttft / floor", _ratio(first, cold), COLD_FLOOR)
    yield Goal(f"{floor}: warm ttft / floor", _ratio(later, warm), WARM_FLOOR[place])
    rate = _beside(results, together, "generated_per_second")
    yield Goal(f"{prefix:,} shared, 8 at once: tokens/s / vLLM's", rate, VLLM_TOGETHER[place], is_upper_bound=False)
    yield Goal(
        f"{prefix:,} shared, 8 at once: later ttft / vLLM's", _beside(results, together, "later_ttft"), VLLM_LATER
    )


def _of_peers(results: Mapping[str, Figures]) -> Iterator[Goal]:
    rate = _beside(results, "unique, 8 at once", "generated_per_second")
    yield Goal("unique prompts, 8 at once: tokens/s / vLLM's", rate, VLLM_UNIQUE, is_upper_bound=False)
    turns = _get(results, "ours", "chat") or [None] * 4
    for turn in range(len(turns)):
        ours, theirs = _get(results, "ours", "chat", turn, "ttft"), _get(results, "vllm", "chat", turn, "ttft")
        yield Goal(f"chat, turn {turn + 1}: median ttft / vLLM's", _ratio(ours, theirs), VLLM_CHAT)
    for kind, figures in results.get("recurrent_kinds", {}).items():
        yield Goal(f"decode of 8 / transformers', {kind}", figures["decode"], DECODE_KIND, is_upper_bound=False)
    if not results.get("recurrent_kinds"):
        yield Goal("decode of 8 / transformers', each recurrent kind", None, DECODE_KIND, is_upper_bound=False)


def _of_ourselves(results: Mapping[str, Figures]) -> Iterator[Goal]:
    turns = _get(results, "ours", "chat")
    computed = None if turns is None else float(sum(turn["computed"] for turn in turns))
    yield Goal("chat: prompt tokens computed (must hold)", computed, CHAT_TOKENS)
    on_off = _get(results, "ours", "unique, cache on / off")
    yield Goal("unique prompts: tokens/s with the cache on / off", on_off, CACHE_ON_OFF, is_upper_bound=False)
    contexts = results.get("decode_context", {})
    times = [contexts[context] for context in sorted(contexts, key=int)]
    grown = times[-1] / times[0] if times else None
    yield Goal("decode step of 8 behind the longest context / the shortest", grown, DECODE_CONTEXT)


def _of_the_host(results: Mapping[str, Figures]) -> Iterator[Goal]:
    for kind, bound in (("cold", HOST_COLD), ("cached", HOST_CACHED)):
        yield Goal(f"host path, 131,072 tokens: {kind} / hashlib", _get(results, "host_path", kind), bound)
    step = _get(results, "host_step", "64 greedy", "goal")
    yield Goal("plan + stage + commit + output, 64 decode: ms", step, HOST_STEP)
    for words in SAMPLING_WORDS:
        for row_metadata, bound in SAMPLING.items():
            ratio = _get(results, "sampling", words, row_metadata)
            yield Goal(f"sampling 64 rows of {int(words):,}, {row_metadata}: softmaxes", ratio, bound)


def _of_drafts(results: Mapping[str, Figures]) -> Iterator[Goal]:
    found = results.get("speculation", {})
    ratios = {name: figures["ratio"] for name, figures in found.items() if "ratio" in figures}
    repeating = [ratio for name, ratio in ratios.items() if name.endswith((", editing, 1", ", extraction, 1"))]
    name = "tokens/s with drafts / without"
    least = min(repeating, default=None)
    yield Goal(f"texts that repeat themselves, 1 at once: {name}, worst", least, DRAFTS_REPEATING, is_upper_bound=False)
    least = min(ratios.values(), default=None)
    yield Goal(f"any text, 1, 8 and 32 at once: {name}, worst", least, DRAFTS_ANYWHERE, is_upper_bound=False)


def _beside(results: Mapping[str, Figures], case: str, key: str) -> float | None:
    """Ours over vLLM's."""
    return _ratio(_get(results, "ours", case, key), _get(results, "vllm", case, key))


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _get(found: Any, *path: str | int) -> Any:
    """Return the value at the path, or None if the path does not exist."""
    for key in path:
        try:
            found = found[key]
        except (KeyError, IndexError, TypeError):
            return None
    return found
