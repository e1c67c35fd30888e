"""One step as a message: everything that executing it needs, in plain values.

The scheduler writes it, staging reads it and nothing else. It can be pickled, and two schedulers that were given the
same commands write equal ones, so that ranks can act on their own copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.matching import Restore
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.logits_options import LogitsOptions, logits_options_of
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.running_slots import RunningSlot
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot

LAST_SAMPLED: Final = -1
"""In place of a token id: the one that the step before sampled for this request, wherever it is by now."""
_UNKNOWN: Final = (LAST_SAMPLED,)


@dataclass(frozen=True)
class Sampling:
    """How the token behind a chunk is chosen, and what is told about it.

    Attributes:
        temperature: Not needed if greedy, as the next three.
        top_k: 0 is off.
        top_p: 0 is off.
        uniform: In [0, 1), from the request's own generator; None is greedy.
        forbidden: Tokens that must not come yet.
        top_n: List so many of the best tokens with their log-probs; None asks for no log-prob at all.
        shaping: What is done to the logits before; None if nothing is.
    """

    temperature: float
    top_k: int
    top_p: float
    uniform: float | None
    forbidden: tuple[int, ...]
    top_n: int | None
    logits_options: LogitsOptions | None = None


@dataclass(frozen=True)
class Scoring:
    """Prompt tokens whose log-probs are asked for: the logits at positions [start, end) are to score `targets`."""

    start: int
    end: int
    targets: tuple[int, ...]
    top_n: int


@dataclass(frozen=True)
class ScheduledChunk:
    """What one request computes in a step.

    Attributes:
        request_id: Whose it is.
        token_ids: Those at positions [start, end); `LAST_SAMPLED` for one that the host does not know yet.
        start: First position; tokens before it are computed or skipped.
        end: Behind the last one.
        is_decode: One generated token on top of live states.
        block_ids: Of positions [0, end), in order.
        shared_end: KV below this position lies in blocks that others use, and is not written.
        running_slot: Of its recurrent states.
        restore: The snapshot to copy there first; None if there is none to copy.
        snapshots: States that the chunk passes, and where to keep them.
        sampling: How its next token is chosen; None if the chunk yields none.
        scoring: None if no prompt token of the chunk is scored.
        target_sampling: How the tokens behind its last tokens, which are drafts, are chosen if these come.
    """

    request_id: int
    token_ids: tuple[int, ...]
    start: int
    end: int
    is_decode: bool
    block_ids: tuple[BlockId, ...]
    shared_end: int
    running_slot: RunningSlot
    restore: Restore | None = None
    snapshots: tuple[Snapshot, ...] = ()
    sampling: Sampling | None = None
    scoring: Scoring | None = None
    target_sampling: tuple[Sampling, ...] = ()

    @property
    def drafts(self) -> tuple[int, ...]:
        """Those of its tokens that are guesses: the last ones."""
        return self.token_ids[self.length - len(self.target_sampling) :]

    @property
    def length(self) -> int:
        """Tokens."""
        return self.end - self.start


@dataclass(frozen=True)
class ScheduledStep:
    """A step: the decodes, then the prefills.

    Attributes:
        chunks: At most one of each request.
        num_decode: The first so many of them decode.
    """

    chunks: tuple[ScheduledChunk, ...]
    num_decode: int

    @property
    def num_tokens(self) -> int:
        """Tokens that it computes."""
        return sum(chunk.length for chunk in self.chunks)


def describe_step(chunks: Iterable[Chunk], block_size: int) -> ScheduledStep:
    """The message of a step whose blocks and slots have been given out; decodes come first."""
    described = tuple(_describe(chunk, block_size) for chunk in chunks)
    num_decode = sum(chunk.is_decode for chunk in described)
    assert all(chunk.is_decode for chunk in described[:num_decode]), "decodes come first"
    return ScheduledStep(described, num_decode)


def _describe(chunk: Chunk, block_size: int) -> ScheduledChunk:
    request, sequence, start, end = chunk.request, chunk.request.sequence, chunk.start, chunk.end
    assert sequence.running_slot is not None, f"request {request.request_id} runs and has no live slot"
    is_decode = chunk.is_decode
    return ScheduledChunk(
        request_id=request.submission.request_id,
        token_ids=_token_ids(chunk),
        start=start,
        end=end,
        is_decode=is_decode,
        block_ids=sequence.block_table[: -(-end // block_size)],  # of a whole table, no copy
        shared_end=sequence.shared_end,
        running_slot=sequence.running_slot,
        restore=sequence.restore,
        snapshots=_snapshots(chunk) if sequence.snapshots or chunk.drafts else (),
        sampling=_sampling(request) if chunk.yields_token else None,
        scoring=None if is_decode else _scoring(chunk),
        target_sampling=_target_sampling(chunk) if chunk.drafts else (),
    )


def describe_ahead(chunks: Iterable[Chunk], block_size: int, states: Mapping[int, Snapshot]) -> ScheduledStep:
    """The message of a step that decodes a token of each request which the step before is about to give it.

    Args:
        chunks: One token each, behind all that is known of their requests (see `AsyncPlanner`).
        block_size: Tokens.
        states: Request id -> where its states are kept, if they are; of a name that is no block hash.
    """
    described = tuple(_describe_ahead(chunk, block_size, states) for chunk in chunks)
    return ScheduledStep(described, len(described))


def _describe_ahead(chunk: Chunk, block_size: int, states: Mapping[int, Snapshot]) -> ScheduledChunk:
    request, sequence = chunk.request, chunk.request.sequence
    assert sequence.running_slot is not None, f"request {request.request_id} runs and has no live slot"
    return ScheduledChunk(
        request_id=request.submission.request_id,
        token_ids=_UNKNOWN,
        start=chunk.start,
        end=chunk.end,
        is_decode=True,
        block_ids=sequence.block_table[: -(-chunk.end // block_size)],
        shared_end=sequence.shared_end,
        running_slot=sequence.running_slot,
        snapshots=(states[request.request_id],) if request.request_id in states else (),
        sampling=_sampling(request, _UNKNOWN),
    )


def _target_sampling(chunk: Chunk) -> tuple[Sampling, ...]:
    return tuple(_sampling(chunk.request, chunk.drafts[: i + 1]) for i in range(len(chunk.drafts)))


def _snapshots(chunk: Chunk) -> tuple[Snapshot, ...]:
    sequence = chunk.request.sequence
    if chunk.drafts:
        return sequence.draft_states
    return tuple([one for one in sequence.snapshots if chunk.start < one.position <= chunk.end])


def _token_ids(chunk: Chunk) -> tuple[int, ...]:
    sequence = chunk.request.sequence
    if chunk.end <= sequence.prompt_length:
        return chunk.request.prompt_tokens[chunk.start : chunk.end]  # of a whole prompt, no copy
    known = tuple(sequence.tokens[chunk.start : chunk.end])
    return known + chunk.drafts if chunk.drafts else known


def _sampling(request: Request, drafts: tuple[int, ...] = ()) -> Sampling:
    """Of the request's next token, or of the one behind these drafts: all that depends on where it stands."""
    params = request.submission.params
    wish = params.temperature, params.top_k, params.top_p
    may_stop = request.may_stop or request.generated_count + len(drafts) >= params.min_tokens
    forbidden = () if may_stop else request.submission.end_ids
    top_n = params.top_n_logprobs if params.return_log_probs else None
    logits_options = logits_options_of(request, drafts) if request.submission.processes_logits else None
    if params.is_greedy and logits_options is None:
        return _greedy(*wish, forbidden, top_n)
    uniform = None if params.is_greedy else request.sequence.rng.current(len(drafts))
    return Sampling(*wish, uniform, forbidden, top_n, logits_options)


@lru_cache(maxsize=256)
def _greedy(temperature: float, top_k: int, top_p: float, forbidden: tuple[int, ...], top_n: int | None) -> Sampling:
    """Greedy requests with equal wishes have one of these, from step to step."""
    return Sampling(temperature, top_k, top_p, None, forbidden, top_n)


def _scoring(chunk: Chunk) -> Scoring | None:
    """Those of the chunk's prompt tokens that have no log-prob yet.

    Who asks for them skips none, so they are those that are computed for the first time. This is known to every
    scheduler that has the same history; the log-probs themselves are not.
    """
    request = chunk.request
    if not request.params.wants_prompt_log_probs:
        return None
    start = max(chunk.start, request.sequence.ledger.known_end)
    end = min(chunk.end, request.prompt_length - 1)
    if start >= end:
        return None
    return Scoring(start, end, request.prompt_tokens[start + 1 : end + 1], request.params.top_n_logprobs)
