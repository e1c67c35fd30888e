"""What a person sees of a run: a progress bar on standard error, sizes and a table on standard output."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from megatron_ext.memory.budget import Geometry
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.serving.submission import Pass

_PROMPT_CHARACTERS = 60
_TEXT_CHARACTERS = 240
_FILE_WIDTH = 120  # characters


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """A bar over `total` requests, only where standard error is a terminal; log lines go above it.

    Yields:
        A function that takes the number of requests that have ended so far.
    """
    with tqdm(total=total, unit="request", disable=None, leave=False) as bar, logging_redirect_tqdm():
        yield lambda done: bar.update(done - bar.n)


def make_console(quiet: bool) -> Console:
    """A console on standard output; where that is no terminal, wide enough for the table."""
    return Console(highlight=False, quiet=quiet, width=None if sys.stdout.isatty() else _FILE_WIDTH)


def print_geometry(geometry: Geometry, model: str, console: Console, request_state_bytes: int = 0) -> None:
    """Print what the engine has room for (EX-6), and what the states of the longest request can take (LA-4)."""
    table = Table("engine", model, show_lines=False)
    blocks, block = f"{geometry.blocks:,} blocks", f"{geometry.block_size_tokens} tokens"
    table.add_row("KV cache", f"{blocks} of {block}, {geometry.block_bytes:,} bytes each")
    if geometry.state_bytes:
        cost = f", as much as the KV of {geometry.state_in_kv_tokens} tokens" if geometry.state_in_kv_tokens else ""
        table.add_row("live states", f"{geometry.live_states:,} of {geometry.state_bytes:,} bytes each{cost}")
        table.add_row("snapshots", f"{geometry.snapshot_slots:,} slots of the same size")
    if request_state_bytes:
        table.add_row("states of one request", f"at most {request_state_bytes:,} bytes, its snapshots included")
    shortest = geometry.shortest_prompt_that_can_hit
    hits = "nothing is skipped" if shortest is None else f"prompts of {shortest} tokens and more can hit"
    table.add_row("prefix cache", hits)
    console.print(table)


def print_report(passes: Sequence[Pass], console: Console) -> None:
    """Print the table of all requests, and totals below it."""
    table = Table(show_lines=True)
    for heading, justify in (
        ("id", "right"),
        ("end of prompt", "left"),
        ("generated", "left"),
        ("prompt", "right"),
        ("skipped", "right"),
        ("new", "right"),
        ("ttft", "right"),
        ("total", "right"),
        ("ended", "left"),
    ):
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=justify == "right")
    for one in passes:
        for record in one.records:
            table.add_row(*_row(record))
    console.print(table)
    for line in summary(passes):
        console.print(line, markup=False, soft_wrap=True)


def summary(passes: Sequence[Pass]) -> list[str]:
    """Lines of totals over all requests."""
    records = [record for one in passes for record in one.records]
    failed = sum(record.status is not Status.COMPLETED for record in records)
    count = f"{len(records)} request{'' if len(records) == 1 else 's'}"
    generated = sum(len(record.generated_tokens) for record in records)
    seconds = sum(one.seconds for one in passes)
    rates = ", ".join(f"{one.throughput:.1f}" for one in passes)
    computed = sum(record.computed_prefill_token_count for record in records)
    skipped = sum(record.skipped_prefill_token_count for record in records)
    reasons: Counter[str] = sum((Counter(record.prefill_reasons) for record in records), Counter())
    why = ", ".join(f"{reason} {tokens}" for reason, tokens in reasons.most_common())
    return [
        f"{count}{f', {failed} not completed' if failed else ''}: "
        f"{generated} tokens generated in {seconds:.1f} s ({rates} tokens/s)",
        f"prompt tokens: {computed} computed, {skipped} skipped ({100 * skipped / max(1, computed + skipped):.1f}%)",
        *([f"computed because: {why}"] if why else []),
    ]


def _row(record: RequestRecord) -> tuple[str, ...]:
    text = record.error if record.status is not Status.COMPLETED and record.error else record.generated_text
    return (
        str(record.request_id),
        escape(_end(record.prompt_text or "", _PROMPT_CHARACTERS)),
        escape(_beginning(text, _TEXT_CHARACTERS)),
        str(record.prompt_token_count),
        str(record.skipped_prefill_token_count),
        str(len(record.generated_tokens)),
        "-" if record.ttft is None else f"{1000 * record.ttft:.0f} ms",
        f"{1000 * record.latency:.0f} ms",
        record.finish_reason or record.status.name.lower(),
    )


def _beginning(text: str, count: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= count else text[: count - 3] + "..."


def _end(text: str, count: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= count else "..." + text[3 - count :]
