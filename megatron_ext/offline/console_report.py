"""Console report at the end of a run: prompts and outputs, a line of numbers a request, then totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console

from megatron_ext.console.terminal import beginning, end, printable, wrapped
from megatron_ext.offline.passes import Pass
from megatron_ext.offline.results import PromptText
from megatron_ext.scheduling.record import RequestRecord, Status

AT_EACH_END = 5
_MAX = 2 * AT_EACH_END + 3  # up to this many requests, none is left out
_TEXT_LINES = 3
_HEADINGS = ("id", "prompt", "skipped", "new", "ttft", "total")
_WIDTHS = (6, 8, 9, 6, 11, 11)  # columns; together with "ended" they fit 80
_INDENT = " " * 8
_MAX_READ = 4000  # characters of a text that are read


def print_requests(
    records: Sequence[RequestRecord], console: Console, where: str | None, prompt_text: PromptText
) -> None:
    """Print the table.

    Args:
        records: All requests.
        console: Console of any width.
        where: Clause that says which requests are in which file; None if none are.
        prompt_text: Text of a prompt that is shown.
    """
    start, stop = (AT_EACH_END, len(records) - AT_EACH_END) if len(records) > _MAX else (len(records),) * 2  # left out
    _print(console, beginning(_columns(_HEADINGS, "ended"), console.width), "bold")
    for record in records[:start]:
        _print_request(record, console, prompt_text)
    if start < stop:
        for line in _left_out(records[start:stop], where):
            _print(console, line, "italic")
    for record in records[stop:]:
        _print_request(record, console, prompt_text)


def _print_request(record: RequestRecord, console: Console, prompt_text: PromptText) -> None:
    width = max(20, console.width - len(_INDENT) - 2)
    _print(console, beginning(_columns(*_numbers(record)), console.width), "")
    prompt = printable((prompt_text(record) or "")[-_MAX_READ:])
    _print(console, f"{_INDENT}< {end(prompt, width)}", "dim")
    failed = record.error if record.status is not Status.COMPLETED else None
    text = printable((failed or record.generated_text)[:_MAX_READ])
    for index, line in enumerate(wrapped(text, width, _TEXT_LINES)):
        mark = "  " if index else "! " if failed else "> "
        _print(console, f"{_INDENT}{mark}{line}", "")


def _numbers(record: RequestRecord) -> tuple[Sequence[str], str]:
    ended = record.finish_reason or record.status.name.lower()
    return (
        str(record.request_id),
        str(record.prompt_token_count),
        str(record.skipped_prefill_token_count),
        str(len(record.generated_tokens)),
        "-" if record.ttft is None else f"{1000 * record.ttft:.0f} ms",
        f"{1000 * record.latency:.0f} ms",
    ), ended


def _columns(values: Sequence[str], ended: str) -> str:
    return "".join(value.rjust(width) for value, width in zip(values, _WIDTHS, strict=True)) + f"  {ended}"


def _left_out(records: Sequence[RequestRecord], where: str | None) -> list[str]:
    ends = Counter(record.status.name.lower() for record in records)
    counts = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    lines = [f"{_INDENT}... {len(records)} requests are left out here ({counts})"]
    failed = [str(record.request_id) for record in records if record.status is Status.FAILED]
    if failed:
        rest = ", ..." if len(failed) > AT_EACH_END else ""
        lines.append(f"{_INDENT}... among them failed: {', '.join(failed[:AT_EACH_END])}{rest}")
    return [*lines, f"{_INDENT}... {where or '--output-path FILE.json writes all requests'}"]


def _print(console: Console, line: str, style: str) -> None:
    console.print(line, style=style or None, markup=False, emoji=False, highlight=False, soft_wrap=True)


def print_report(
    passes: Sequence[Pass],
    console: Console,
    where: str | None,
    prompt_text: PromptText,
    lost: Mapping[str, int] | None = None,
) -> None:
    """Print the requests, or the first and last few of many, and the totals of all.

    Args:
        passes: Passes that ran.
        where: Clause that says which requests are in which file; None if none are.
        lost: See `EngineStatistics.prefix_cache_lost`.
    """
    print_requests([record for one in passes for record in one.records], console, where, prompt_text)
    console.print()
    for line in [*summary(passes), *loss_lines(lost)]:
        console.print(line, markup=False, soft_wrap=True)


def summary(passes: Sequence[Pass]) -> list[str]:
    """Return lines of totals over all requests."""
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


def loss_lines(lost: Mapping[str, int] | None) -> list[str]:
    """Return a line on the tokens that more memory would have saved; empty if it would have saved nothing."""
    if not lost or not lost["requests"]:
        return []
    wants = {"snapshot slots": lost["tokens_for_want_of_slots"], "blocks": lost["tokens_for_want_of_blocks"]}
    why = ", ".join(f"{tokens} for lack of {what}" for what, tokens in wants.items() if tokens)
    requests = f"{lost['requests']} request{'' if lost['requests'] == 1 else 's'}"
    return [
        f"lost: {sum(wants.values())} prompt tokens of {requests} had been cached and were evicted ({why}), on "
        f"average {lost['requests_since_given_up']} requests before"
    ]
