"""Several steps at once, where nothing happens in them but that each running request gets its next token.

For whoever knows the tokens before: the simulator. No request begins, ends, waits, fills a block, or needs one, so no
step would plan, allocate, publish or evict anything; what is left of a step is done to the requests' own parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler


def uniform_steps(scheduler: Scheduler) -> int:
    """How many of the next steps are of that kind; they do not look at what the tokens are.

    Requests must end by count alone, and there must be no drafts.
    """
    queues, size = scheduler.queues, scheduler.limits.block_size
    if len(queues.waiting) or len(queues.paused):
        return 0
    return min((_alike(request, size) for request in queues.running), default=0)


def _alike(request: Request, size: int) -> int:
    """Steps before the one that fills its last block, or brings its last token."""
    sequence = request.sequence
    if not sequence.is_decoding or sequence.snapshots:
        return 0
    to_come = request.params.num_tokens_to_generate - sequence.generated_count
    return min(to_come, len(sequence.block_table) * size - sequence.computed_end) - 1


def fast_forward(scheduler: Scheduler, tokens: Mapping[int, Sequence[int]]) -> None:
    """The running requests, all of them, have got these tokens by request id: of as many steps that are alike."""
    for request in scheduler.queues.running:
        sequence, new = request.sequence, tokens[request.request_id]
        for token in new:
            sequence.append(token)
        request.timeline.step_count += len(new)
        scheduler.counters.prefill_tokens += sequence.advance(sequence.computed_end + len(new))
