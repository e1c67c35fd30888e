"""Scheduled step as a message: everything that its execution needs, in plain values.

The scheduler writes the message, and the runner reads nothing else. It can be pickled, and two schedulers that were
given the same commands write equal messages, so that ranks can act on their own copies.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from megatron_ext.config import RequestParams
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.matching import Restore
from megatron_ext.prefix_cache.slabs import NO_CHANGES, ArenaChanges
from megatron_ext.scheduling.audit import Comparison
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.running_slots import RunningSlot
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot

LAST_SAMPLED: Final = -1
"""Placeholder for the token id that the previous step sampled for this request, which may still be on the device."""
_UNKNOWN: Final = (LAST_SAMPLED,)


@dataclass(frozen=True)
class LogitsOptions:
    """Logits processing options of one request at one position, applied before temperature, top_k and top_p.

    They contain everything that the processing depends on, including the tokens of the whole sequence. No state is
    carried from step to step: chunks, preemption, suspension and cache hits make no difference.

    Attributes:
        params: Parameters of the request, such as penalties, biases and min_p.
        tokens: Packed tokens of prompt and generation; empty if neither penalties nor bad words need them.
        prompt_length: Prompt tokens among them.
        bad_words: Token ids of each word; the last one must not follow the others.
        allowed: One bit per token id that is allowed, the lowest id first; None allows every token.
    """

    params: RequestParams
    tokens: array[int] = field(default_factory=lambda: array("I"))
    prompt_length: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed: bytes | None = None

    @property
    def ruled_out(self) -> list[int]:
        """Last tokens of bad words whose other tokens are the newest generated ones."""
        if not self.bad_words:
            return []
        generated = self.tokens[self.prompt_length :]
        return [
            word[-1]
            for word in self.bad_words
            if len(word) == 1 or generated[1 - len(word) :] == array(generated.typecode, word[:-1])
        ]


@dataclass(frozen=True)
class Sampling:
    """Sampling options of one token: how it is chosen and which log-probs are reported.

    Attributes:
        temperature: Temperature; unused if greedy, like the next three.
        top_k: Number of tokens to sample from; 0 disables the filter.
        top_p: Probability mass to sample from; 0 disables the filter.
        uniform: Number in [0, 1) from the request's own generator; None if greedy.
        forbidden: Token ids that are not allowed yet.
        top_n: Number of best tokens to list with their log-probs; None requests no log-prob at all.
        logits_options: Logits processing options; None if logits are not processed.
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
    """Prompt tokens whose log-probs are requested: the logits at positions [start, end) score `targets`.

    Attributes:
        start: First position; the one before the chunk is scored from the hidden state kept with its block.
        end: Position after the last one.
        targets: Tokens after these positions.
        top_n: Number of best tokens to list.
        kept_end: Position up to which the log-probs are read that are kept with blocks, before the first chunk.
        keeps: Whether log-probs are kept with the blocks of the chunk.
        block_ends: Numbers of the blocks whose last hidden states are kept.
    """

    start: int
    end: int
    targets: tuple[int, ...]
    top_n: int
    kept_end: int = 0
    keeps: bool = False
    block_ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class ForkSource:
    """Request whose prompt a fork takes over: the fork's token is sampled from the last logits of its chunk.

    Attributes:
        request_id: Id of the request.
        running_slot: Running state slot of the request, whose states are copied after the step.
        block_copy: Partial block of the prompt in its block table, and the fork's copy; None without such a block.
    """

    request_id: int
    running_slot: RunningSlot
    block_copy: tuple[BlockId, BlockId] | None


@dataclass(frozen=True)
class ScheduledChunk:
    """Part of a step that belongs to one request.

    Attributes:
        request_id: Id of the request.
        token_ids: Token ids at positions [start, end); `LAST_SAMPLED` for one that the host does not know yet.
        start: First position; tokens before it are computed or skipped.
        end: Position after the last token.
        is_decode: True for one generated token on top of a running state.
        block_ids: Blocks of positions [0, end), in order, and of tokens after them whose log-probs are kept.
        shared_end: Position below which KV lies in shared blocks and is not written.
        running_slot: Running state slot of the request.
        restore: Snapshot to copy into that slot first; None if there is no snapshot to copy.
        snapshots: Snapshots at positions that the chunk passes, with their slots.
        sampling: Sampling options of its next token; None if the chunk yields none.
        scoring: Prompt tokens to score; None if the chunk has none.
        target_sampling: Sampling options of the token after each draft, used if the draft is accepted.
        source: Source of a fork, whose chunk is empty; None for every other chunk.
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
    source: ForkSource | None = None

    @property
    def drafts(self) -> tuple[int, ...]:
        """Draft tokens: the last tokens of the chunk."""
        return self.token_ids[self.length - len(self.target_sampling) :]

    @property
    def length(self) -> int:
        """Tokens of the chunk."""
        return self.end - self.start


@dataclass(frozen=True)
class ScheduledStep:
    """Step: the decodes, then the prefills, then the forks.

    Attributes:
        chunks: Chunks of the step, at most one per request.
        num_decode: Number of decodes, which come first.
        changes: Changes of the arena before the step, and their order.
        comparison: Cached entries to compare, after the step, with its audit's own; None without an audit.
        num_forks: Number of forks, which come last.
    """

    chunks: tuple[ScheduledChunk, ...]
    num_decode: int
    changes: ArenaChanges = NO_CHANGES
    comparison: Comparison | None = None
    num_forks: int = 0

    @property
    def forks(self) -> tuple[ScheduledChunk, ...]:
        """Empty chunks of samples that take over the prompts of prefills that end."""
        return self.chunks[len(self.chunks) - self.num_forks :]

    @property
    def yielding(self) -> list[ScheduledChunk]:
        """Chunks that yield a token."""
        return [chunk for chunk in self.chunks if chunk.sampling is not None]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.length for chunk in self.chunks)


def describe_step(
    chunks: Iterable[Chunk],
    block_size: int,
    changes: ArenaChanges = NO_CHANGES,
    comparison: Comparison | None = None,
    *,
    ahead: Mapping[int, tuple[Snapshot, ...]] | None = None,
) -> ScheduledStep:
    """Return the message of a step whose blocks and slots are allocated.

    Args:
        chunks: Chunks of the step; decodes come first, forks last.
        block_size: Tokens of a block.
        changes: Changes of the arena before the step.
        comparison: See `ScheduledStep`.
        ahead: For a step launched ahead, whose requests decode the tokens that the current step samples for them (see
            `AsyncPlanner`): request id -> slots of the states to keep, if any, whose names are not block hashes. None
            for a step of known tokens.
    """
    described = tuple(_describe(chunk, block_size, ahead) for chunk in chunks)
    num_decode = sum(chunk.is_decode for chunk in described)
    assert all(chunk.is_decode for chunk in described[:num_decode]), "decodes come first"
    num_forks = sum(chunk.source is not None for chunk in described)
    return ScheduledStep(described, num_decode, changes, comparison, num_forks)


def _source(chunk: Chunk, block_size: int) -> ForkSource | None:
    if chunk.source is None:
        return None
    source, full = chunk.source.request, chunk.end // block_size
    assert source.running_slot is not None, "it runs"
    tables = source.block_table, chunk.request.block_table
    copy = (tables[0][full], tables[1][full]) if chunk.end % block_size else None
    return ForkSource(source.request_id, source.running_slot, copy)


def _describe(chunk: Chunk, block_size: int, ahead: Mapping[int, tuple[Snapshot, ...]] | None = None) -> ScheduledChunk:
    request, start, end = chunk.request, chunk.start, chunk.end
    assert request.running_slot is not None, f"request {request.request_id} runs and has no running state slot"
    is_decode, is_ahead = chunk.is_decode, ahead is not None
    unknown = _UNKNOWN if is_ahead and end > len(request.tokens) else ()
    scoring = None if is_decode else _scoring(chunk, block_size)
    blocks_end = end if scoring is None or not scoring.keeps else max(end, scoring.end + 1, scoring.kept_end)
    return ScheduledChunk(
        request_id=request.request_id,
        token_ids=unknown or _token_ids(chunk),
        start=start,
        end=end,
        is_decode=is_decode,
        block_ids=request.block_table[: -(-blocks_end // block_size)],  # no copy if this is the whole table
        shared_end=request.shared_end,
        running_slot=request.running_slot,
        restore=None if is_ahead else request.restore,  # which the current step restores
        snapshots=(_snapshots(chunk) if request.snapshots or chunk.drafts else ())
        + (() if ahead is None else ahead.get(request.request_id, ())),
        sampling=_sampling(request, unknown) if unknown or chunk.yields_token else None,
        scoring=scoring,
        target_sampling=_target_sampling(chunk) if chunk.drafts else (),
        source=_source(chunk, block_size),
    )


def _target_sampling(chunk: Chunk) -> tuple[Sampling, ...]:
    return tuple(_sampling(chunk.request, chunk.drafts[: i + 1]) for i in range(len(chunk.drafts)))


def _snapshots(chunk: Chunk) -> tuple[Snapshot, ...]:
    request = chunk.request
    if chunk.drafts:
        return request.draft_states
    return tuple([one for one in request.snapshots if chunk.start < one.position <= chunk.end])


def _token_ids(chunk: Chunk) -> tuple[int, ...]:
    request = chunk.request
    if chunk.end <= request.prompt_length:
        return chunk.request.prompt_tokens[chunk.start : chunk.end]  # no copy if this is the whole prompt
    known = tuple(request.tokens[chunk.start : chunk.end])
    return known + chunk.drafts if chunk.drafts else known


def _sampling(request: Request, drafts: tuple[int, ...] = ()) -> Sampling:
    """Return the sampling options of the request's next token, or of the token after `drafts`."""
    params = request.params
    options = params.temperature, params.top_k, params.top_p
    may_stop = request.generated_count + len(drafts) >= params.min_tokens
    forbidden = () if may_stop else request.end_ids
    top_n = params.top_n_logprobs if params.return_log_probs else None
    logits_options = _logits_options_of(request, drafts) if request.processes_logits else None
    if params.is_greedy and logits_options is None:
        return _greedy(*options, forbidden, top_n)
    uniform = None if params.is_greedy else request.rng.current(len(drafts))
    return Sampling(*options, uniform, forbidden, top_n, logits_options)


def _logits_options_of(request: Request, drafts: Sequence[int] = ()) -> LogitsOptions:
    """Return the logits processing options for the next token of a request, or for the token after `drafts`."""
    params = request.params
    needs_tokens = params.has_penalties or bool(params.bad_words)
    tokens = request.tokens[:] if needs_tokens else request.tokens[:0]
    if needs_tokens:
        tokens.extend(drafts)
    return LogitsOptions(
        params=params,
        tokens=tokens,
        prompt_length=request.prompt_length,
        bad_words=request.bad_words,
        allowed=None if params.response_format is None else request.masks[len(drafts)],
    )


def reads_tokens(params: RequestParams) -> bool:
    """Return whether logits processing depends on tokens generated before."""
    return params.has_penalties or bool(params.bad_words or params.response_format)


@lru_cache(maxsize=256)
def _greedy(temperature: float, top_k: int, top_p: float, forbidden: tuple[int, ...], top_n: int | None) -> Sampling:
    """Return shared options for greedy requests with equal params, from step to step."""
    return Sampling(temperature, top_k, top_p, None, forbidden, top_n)


def _scoring(chunk: Chunk, block_size: int) -> Scoring | None:
    """Return the chunk's prompt tokens that have no log-prob yet, and those whose log-probs are kept.

    Unless log-probs are kept, a request for them skips no token. One that starts again before its first token reads and
    scores all anew. Every scheduler with the same history knows this; the log-probs themselves are not known to all.
    """
    request, kept, length = chunk.request, chunk.request.kept, chunk.request.prompt_length
    if not request.params.wants_prompt_log_probs or request.generated_count:
        return None
    kept_end, is_first = kept.known_end, chunk.start == kept.resume_position
    resumes_there = is_first and chunk.start == kept_end > 0  # the hidden state before it is kept, not computed
    end = min(chunk.end, length - 1)
    start = min(end, max(kept_end - 1, chunk.start - resumes_there))
    ends = range(max(chunk.start, kept_end) // block_size, min(chunk.end, length) // block_size)
    scoring = Scoring(
        start,
        end,
        request.prompt_tokens[start + 1 : end + 1],
        request.params.top_n_logprobs,
        kept_end=kept_end if is_first else 0,
        keeps=kept.keeps_log_probs,
        block_ends=tuple(ends) if kept.keeps_log_probs else (),
    )
    return scoring if scoring.targets or scoring.kept_end or scoring.block_ends else None
