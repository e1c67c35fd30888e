"""Fast forward: several uniform steps at once, in which each running request only gets its next token.

Used by the simulator, which knows the tokens in advance. In these steps no request begins, ends, waits, fills a block,
or needs one, so no step would plan, allocate, publish or evict anything; only the requests' own sequences are updated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler


def uniform_steps(scheduler: Scheduler) -> int:
    """Return the number of next steps that are uniform, whatever their tokens are.

    Requests must end by count alone, and there must be no drafts.
    """
    queues, size = scheduler.queues, scheduler.limits.block_size
    if len(queues.waiting) or len(queues.paused):
        return 0
    return min((_alike(request, size) for request in queues.running), default=0)


def _alike(request: Request, size: int) -> int:
    """Return how many steps only add a token: those before the last block is full or the last token comes."""
    sequence = request.sequence
    if not sequence.is_decoding or sequence.snapshots:
        return 0
    to_come = request.params.num_tokens_to_generate - sequence.generated_count
    return min(to_come, len(sequence.block_table) * size - sequence.computed_end) - 1


def fast_forward(scheduler: Scheduler, tokens: Mapping[int, Sequence[int]]) -> None:
    """Append the tokens of several uniform steps to all running requests; `tokens` is by request id."""
    for request in scheduler.queues.running:
        sequence, new = request.sequence, tokens[request.request_id]
        sequence.extend(new)
        request.timeline.step_count += len(new)
        scheduler.counters.prefill_tokens += sequence.advance(sequence.computed_end + len(new))
