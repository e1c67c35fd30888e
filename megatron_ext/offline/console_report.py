"""Console report at the end of a run: prompts, outputs, totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console

from megatron_ext.offline.passes import Pass
from megatron_ext.offline.prompt_texts import PromptText, submitted_text
from megatron_ext.offline.request_table import print_requests
from megatron_ext.scheduling.record import Status


def print_report(
    passes: Sequence[Pass],
    console: Console,
    where: str | None = None,
    prompt_text: PromptText = submitted_text,
    lost: Mapping[str, int] | None = None,
) -> None:
    """Print the requests, or the first and last few of many, and the totals of all.

    Args:
        passes: Passes that ran.
        console: Console to print on.
        where: Clause that says which requests are in which file; None if none are.
        prompt_text: Text of a prompt.
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
