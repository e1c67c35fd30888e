"""What a person sees of a run on standard output: sizes at its start, prompts, answers and totals at its end."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_ext.memory.budget import Geometry
from megatron_ext.scheduling.record import Status
from megatron_ext.serving.request_table import print_requests
from megatron_ext.serving.submission import Pass
from megatron_ext.serving.terminal import Output, printable

_FILE_WIDTH = 120  # characters


def make_console(quiet: bool, output: Output | None = None) -> Console:
    """A console on standard output that never raises; where that is no terminal, of a width that files have."""
    output = output or Output(sys.stdout)
    return Console(file=output, highlight=False, quiet=quiet, width=None if output.isatty() else _FILE_WIDTH)


def print_geometry(geometry: Geometry, model: str, console: Console, request_state_bytes: int = 0) -> None:
    """Print what the engine has room for (EX-6), and what the states of the longest request can take (LA-4)."""
    table = Table("engine", escape(printable(model)), show_lines=False)
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


def print_report(passes: Sequence[Pass], console: Console, where: str | None = None) -> None:
    """Print the requests, of many the first and last few, and totals of all below them; `where` all of them are."""
    print_requests([record for one in passes for record in one.records], console, where)
    console.print()
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
