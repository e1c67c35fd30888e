"""Goals of speed: figures of one run that are to be reached, each met or missed by how much. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.cases import Figure, Page
from benchmarks.peers.sizes import TURNS
from benchmarks.peers.work import AT_ONCE, FIRST, LATER, RATE, READ_ONCE, STEP, TTFT, UNIQUE, decode_row, shared_row

CHAT_TOKENS = 6_800  # of 19,072 prompt tokens, in eight conversations of four turns


@dataclass(frozen=True)
class Goal:
    """Bound of a figure, or of its ratio to another case's.

    Attributes:
        name: Measured quantity.
        case: Case that measures it.
        row: Row of the figure; a name that ends in `*` is all rows that begin so, of which the worst counts.
        column: Column of the figure.
        bound: Largest or smallest value that meets the goal.
        is_upper_bound: True if smaller is better.
        over: Case whose same figure it is divided by.
        must_hold: True if missing it is an error, whatever the machine.
    """

    name: str
    case: str
    row: str
    column: str
    bound: float
    is_upper_bound: bool = True
    over: str | None = None
    must_hold: bool = False

    def measured(self, pages: Mapping[str, Page]) -> float | None:
        """Return the figure, or None if it was not measured."""
        found = list(self._values(pages, self.case))
        if self.over is not None:
            others = list(self._values(pages, self.over))
            found = [one / other for one, other in zip(found, others, strict=False) if other]
        return (max if self.is_upper_bound else min)(found, default=None)

    def _values(self, pages: Mapping[str, Page], case: str) -> Iterator[float]:
        for row, figures in pages[case]["rows"].items() if case in pages else ():
            is_named = row.startswith(self.row[:-1]) if self.row.endswith("*") else row == self.row
            value = figures.get(self.column) if is_named else None
            if value is not None:
                yield float(value)

    def judge(self, pages: Mapping[str, Page]) -> dict[str, Figure]:
        """Return the columns of the table of goals."""
        measured = self.measured(pages)
        wanted = f"{'at most' if self.is_upper_bound else 'at least'} {self.bound:,g}{', must hold' * self.must_hold}"
        return {"measured": measured, "wanted": wanted, "result": self.verdict(measured), "case": self.case}

    def is_missed(self, pages: Mapping[str, Page]) -> bool:
        """Return whether the figure was measured and does not meet the goal."""
        return self.verdict(self.measured(pages)).startswith("missed")

    def verdict(self, measured: float | None) -> str:
        """Return whether the goal is met, or by how much it is missed."""
        if measured is None:
            return "not measured"
        is_met = measured <= self.bound if self.is_upper_bound else measured >= self.bound
        factor = measured / self.bound if self.is_upper_bound else self.bound / measured
        return "met" if is_met else f"missed by {100 * (factor - 1):.0f} %"


def _of_5m() -> Iterator[Goal]:
    ours, vllm = "standard.ours_5m", "standard.vllm_5m"
    for prefix, rate in ((2_048, 1.3), (8_192, 1.1)):
        one, eight = shared_row(prefix), shared_row(prefix, AT_ONCE)
        yield Goal(f"5 M, {one}: cold ttft / vLLM's", ours, one, FIRST, 0.8, over=vllm)
        yield Goal(f"5 M, {one}: cold ttft / products by torch.mm", ours, one, "first / torch.mm", 1.5)
        yield Goal(f"5 M, {one}: warm ttft / products by torch.mm", ours, one, "later / torch.mm", 2.0)
        yield Goal(f"5 M, {eight}: tokens/s / vLLM's", ours, eight, RATE, rate, False, over=vllm)
        yield Goal(f"5 M, {eight}: later ttft / vLLM's", ours, eight, LATER, 1.0, over=vllm)
    yield Goal(f"5 M, {UNIQUE}: tokens/s / vLLM's", ours, UNIQUE, RATE, 1.0, False, over=vllm)
    for turn in range(1, TURNS + 1):
        yield Goal(f"chat, turn {turn}: median ttft / vLLM's", ours, f"chat, turn {turn}", TTFT, 0.9, over=vllm)
    yield Goal("chat: prompt tokens computed", ours, "chat, all turns", "computed tokens", CHAT_TOKENS, must_hold=True)
    one = shared_row(2_048)
    yield Goal(f"5 M, {one}: warm ttft / floor", ours, one, "later / floor", 2.0)
    for requests, bound in ((1, 1.2), (4, 0.8)):
        row = decode_row(requests)
        yield Goal(f"5 M, {row}: step / llama.cpp's, f32", ours, row, STEP, bound, over="standard.llama_f32_5m")


def _of_250m() -> Iterator[Goal]:
    ours, vllm, read_once = "standard.ours_250m", "standard.vllm_250m", READ_ONCE
    one, eight = shared_row(2_048), shared_row(2_048, AT_ONCE)
    yield Goal(f"0.25 B, {one}: cold ttft / vLLM's", ours, one, FIRST, 0.7, over=vllm)
    yield Goal(f"0.25 B, {one}: warm ttft / vLLM's", ours, one, LATER, 0.5, over=vllm)
    yield Goal(f"0.25 B, {eight}: tokens/s / vLLM's", ours, eight, RATE, 1.2, False, over=vllm)
    for requests, bound in ((1, 0.85), (4, 0.7), (8, 0.65), (16, 0.75)):
        row = decode_row(requests)
        yield Goal(f"0.25 B, {row}: step / vLLM's", ours, row, STEP, bound, over=vllm)
    for requests, bound in ((1, 1.2), (8, 1.5)):
        row = decode_row(requests)
        yield Goal(f"0.25 B, {row}: {READ_ONCE}", ours, row, read_once, bound)
    yield from _of_one_request("0.25 B", "250m", 1.2, 1.0)
    for requests, bound in ((4, 0.45), (8, 0.55)):
        row = decode_row(requests)
        yield Goal(f"0.25 B, {row}: int8 / fp32", "standard.ours_int8_250m", row, STEP, bound, over=ours)


def _of_one_request(title: str, size: str, in_fp32: float, in_int8: float) -> Iterator[Goal]:
    """Yield the goals of a decode of one request over llama.cpp's, in fp32 and of int8 over Q8_0."""
    row = decode_row(1)
    for types, ours, theirs, bound in (
        ("f32", "ours", "llama_f32", in_fp32),
        ("int8 / Q8_0", "ours_int8", "llama_q8_0", in_int8),
    ):
        name = f"{title}, {row}: step / llama.cpp's, {types}"
        yield Goal(name, f"standard.{ours}_{size}", row, STEP, bound, over=f"standard.{theirs}_{size}")


def _all() -> Iterator[Goal]:
    yield from _of_5m()
    yield from _of_250m()
    yield from _of_one_request("SmolLM2-135M", "smollm2", 1.1, 1.0)
    on_off, context = "latency.unique_prompts", "latency.decode_context"
    yield Goal("unique prompts: tokens/s, cache on / off", on_off, "8 of 2,176", "cache on / off", 0.99, False)
    yield Goal("decode step of 8 at 8,192 tokens / at 128", context, "8,192 tokens", "over the shortest", 1.5)
    for kind in ("Mamba-2 (NemotronH)", "Mamba-1 (Mamba)", "Mamba-1 (Jamba)", "gated delta net (Qwen3-Next)"):
        name = f"decode of 8 / transformers', {kind}"
        yield Goal(name, "throughput.kinds", f"{kind}, decode 8 x 64", "ours / transformers", 1.4, False)
    path = "simulation.host_path"
    yield Goal("host path, 131,072 tokens: cold / hashlib", path, "256 a block, 131,072 tokens", "cold / hashlib", 2.0)
    yield Goal(
        "host path, 131,072 tokens: cached / hashlib", path, "256 a block, 131,072 tokens", "cached / hashlib", 1.5
    )
    yield Goal("plan to output of a step, 64 decode: ms", "latency.host_step", "64 greedy", "plan to output, ms", 1.5)
    for row in ("64 x 32,000", "64 x 131,072"):
        yield Goal(f"sampling {row}: softmaxes", "operators.sampling", row, "no filter, softmaxes", 2.0)
        yield Goal(f"sampling {row}, top_p 0.9: softmaxes", "operators.sampling", row, "top_p 0.9, softmaxes", 8.0)
    gap = "largest gap, with the grammar / without"
    yield Goal(f"stream beside n=64: {gap}", "serving.grammar", gap, "ratio", 2.0, must_hold=True)
    drafts = "throughput.speculation"
    for text in ("editing", "extraction"):
        name = f"drafts, {text}, 1 at once: tokens/s with / without, worst model"
        yield Goal(name, drafts, f"{text}, 1 at once*", "ratio", 1.8, False)
    yield Goal("drafts, any text and number: tokens/s with / without, worst", drafts, "*", "ratio", 0.98, False)
    layer, ratio = "throughput.prediction", "with / without"
    for text in ("greedy", "sampled"):
        row = f"K = 1: {text}, 32 at once"
        yield Goal(f"drafts of mtp, {text}: accepted at depth 1", layer, row, "accepted at 1", 0.55, False)
        row = f"adaptive mtp: {text}, 1 at once"
        yield Goal(f"drafts of mtp, {text}, 1 at once: tokens/s with / without", layer, row, ratio, 1.3, False)
    name = "drafts of mtp, ngram, adaptive: tokens/s with / without, worst"
    yield Goal(name, layer, "adaptive *", ratio, 0.98, False)


GOALS = tuple(_all())
