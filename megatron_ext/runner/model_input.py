"""Input tensors of an eager step, copied to the device once, before the forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
from torch import Tensor

from megatron_ext.mixers.recurrent import RecurrentStep
from megatron_ext.ops.paged_attention import PagedBatch
from megatron_ext.ops.state_slots import SnapshotPlaces, StateSlots
from megatron_ext.ops.varlen import Resumes, packed_chunks, stage_arrays
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.runner.cuda_graphs.input_buffers import PrevSampledTokenIds
from megatron_ext.runner.input_writer import KEPT, BlockRows, Cuts, StagingRules, cut_chunk, input_arrays
from megatron_ext.runner.kept_log_probs import KEPT_PLACES, KeptPlaces, kept_places
from megatron_ext.scheduling.step import LAST_SAMPLED, Sampling, ScheduledChunk, ScheduledStep

_RUNNING_SLOT: Final = attrgetter("running_slot")


class SamplingRow(NamedTuple):
    """Row of the step's logits: its request, its sampling options, and the number of drafts it assumes accepted."""

    request_id: int
    sampling: Sampling
    drafts: int = 0


@dataclass(frozen=True)
class PromptScore:
    """Span of the step's scored tokens that belongs to one request (prompt log-probs)."""

    request_id: int
    rows: slice  # into `ModelInput.score_tokens`
    targets: tuple[int, ...]  # the token that each row should predict
    top_n: int
    kept_blocks: tuple[BlockId, ...] = ()  # whose kept log-probs are read
    keeps: bool = False  # the log-probs, with the blocks of the tokens


@dataclass(frozen=True)
class ModelInput:
    """A step's chunks, packed as [decode | prefill | padding] on the token axis.

    T is the padded token count. The forward computes logits for `sample_tokens` only, m rows of the packed axis; those
    of the k `score_tokens` come after it, a few at a time.
    """

    chunks: tuple[ScheduledChunk, ...]  # as packed, without forks
    num_decode: int
    num_tokens: int  # without padding
    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, absolute
    slot_mapping: Tensor  # [num_tokens] int64, index into the cache flattened over blocks and places
    paged_batch: PagedBatch
    recurrent: RecurrentStep | None  # None for models without recurrent layers
    sample_tokens: Tensor  # [m] int64, packed tokens whose logits are sampled
    sampling: tuple[SamplingRow, ...]  # one for each of them
    score_tokens: Tensor  # [k] int64, packed tokens whose logits score the prompt token after them
    prompt_scores: tuple[PromptScore, ...]
    kept_log_probs: KeptPlaces | None = None  # of log-probs that are kept with blocks


Place = Callable[[dict[str, np.ndarray]], Mapping[str, Tensor]]
"""Function that makes tensors of the arrays of a step, in the same shapes; see `stage_arrays`."""


def stage_step(
    step: ScheduledStep,
    rules: StagingRules,
    block_rows: BlockRows | None = None,
    *,
    place: Place | None = None,
    prev_sampled: PrevSampledTokenIds | None = None,
) -> ModelInput:
    """Stage a step in one copy.

    Args:
        step: Scheduled step; nothing else is read.
        rules: Constants of pools and model.
        block_rows: Block table rows of previous steps to reuse; None to write all rows.
        place: Puts the arrays where the caller keeps them; None to send them to the device.
        prev_sampled: Tokens of the previous step, for decodes whose token the host does not know yet.
    """
    num_decode, forks = step.num_decode, step.forks
    computed = step.chunks[: len(step.chunks) - len(forks)]
    # Decodes by slot: without gaps their states are a slice of the pool, and need no gather.
    chunks = (*sorted(computed[:num_decode], key=_RUNNING_SLOT), *computed[num_decode:])
    prefill = chunks[num_decode:]
    inside, recurrent = rules.snapshots_in_prefill, prefill if rules.has_states else ()
    cuts = [cut_chunk(one, rules.kernel_chunk, snapshots_in_prefill=inside) for one in recurrent]
    arrays = input_arrays(chunks, num_decode, cuts, rules, block_rows or BlockRows())
    firsts, num_tokens = arrays["cu_seqlens_q"], len(arrays["input_ids"])
    score_tokens, scores = _choose_scored(prefill, firsts[num_decode:], rules.block_size)
    sampled = _sampled_tokens(chunks, firsts)
    if forks:  # sampled from the last logits of their sources; they have no token of their own
        last = {one.request_id: firsts[i + 1] - 1 for i, one in enumerate(chunks)}
        sampled = np.concatenate([sampled, [last[one.source.request_id] for one in forks if one.source is not None]])
    arrays |= {"sample_tokens": sampled, "score_tokens": np.asarray(score_tokens)}
    keeps = any(one.keeps for one in scores)
    arrays |= kept_places(prefill, firsts[num_decode:], rules.block_size) if keeps else {}
    # Tokens that the step before has sampled and the host has not read: they are copied on the device below.
    unknown = [row for row, chunk in enumerate(chunks[:num_decode]) if chunk.token_ids[0] == LAST_SAMPLED]
    if unknown:
        assert prev_sampled is not None, "no step has left its tokens"
        places = [prev_sampled.place_of(chunks[row].request_id) for row in unknown]
        arrays |= {"unknown_tokens": firsts[unknown], "prev_sampled": np.asarray(places)}
    staged = stage_arrays(arrays, rules.device) if place is None else place(arrays)
    if unknown and prev_sampled is not None:
        staged["input_ids"].index_copy_(0, staged["unknown_tokens"], prev_sampled.read(staged["prev_sampled"]))
    lengths, ends = tuple(one.length for one in chunks), tuple(one.end for one in chunks)
    where = staged["block_table"], staged["cu_seqlens_q"], staged["seqlens_k"]
    return ModelInput(
        chunks=chunks,
        num_decode=num_decode,
        num_tokens=num_tokens,
        input_ids=staged["input_ids"],
        position_ids=staged["position_ids"],
        slot_mapping=staged["slot_mapping"],
        paged_batch=PagedBatch(num_decode, lengths, ends, rules.block_size, *where),
        recurrent=_stage_recurrent(chunks, num_decode, cuts, staged, rules) if rules.has_states else None,
        sample_tokens=staged["sample_tokens"],
        sampling=tuple([row for one in (*chunks, *forks) if one.sampling is not None for row in _sampling_rows(one)]),
        score_tokens=staged["score_tokens"],
        prompt_scores=tuple(scores),
        kept_log_probs=KeptPlaces(*(staged[name] for name in KEPT_PLACES)) if keeps else None,
    )


def _sampling_rows(chunk: ScheduledChunk) -> tuple[SamplingRow, ...]:
    assert chunk.sampling is not None, "it yields a token"
    name, verified = chunk.request_id, chunk.target_sampling
    first = SamplingRow(name, chunk.sampling)
    return (first, *(SamplingRow(name, one, i) for i, one in enumerate(verified, start=1))) if verified else (first,)


def _sampled_tokens(chunks: Sequence[ScheduledChunk], firsts: np.ndarray) -> np.ndarray:
    """Return the packed tokens whose logits are sampled, [m]: a chunk's last one, and those before its drafts."""
    sampled = [i for i, chunk in enumerate(chunks) if chunk.sampling is not None]
    last = firsts[1:][sampled] - 1
    if not any(chunk.target_sampling for chunk in chunks):
        return last
    drafts = [len(chunks[i].target_sampling) for i in sampled]
    return np.concatenate([np.arange(end - count, end + 1) for end, count in zip(last, drafts, strict=True)])


def _stage_recurrent(
    chunks: Sequence[ScheduledChunk], num_decode: int, cuts: Cuts, staged: Mapping[str, Tensor], rules: StagingRules
) -> RecurrentStep:
    slots = [chunk.running_slot for chunk in chunks[:num_decode]]
    decode_slots = _as_slice(slots) or staged["slots"][:num_decode]
    if not cuts:
        return RecurrentStep(num_decode, decode_slots, None, None)
    packed = packed_chunks(cuts, staged, Resumes(rules.block_size, staged["seqlens_k"][num_decode:]))
    kept = SnapshotPlaces(*(staged[name] for name in KEPT)) if len(staged[KEPT[0]]) else None
    return RecurrentStep(
        num_decode, decode_slots, packed, StateSlots(staged["slots"][num_decode:], staged["has_state"].bool(), kept)
    )


def _as_slice(slots: Sequence[int]) -> slice | None:
    """Return ascending slots without a gap as a slice; None if `slots` is empty or has a gap."""
    if not slots or slots[-1] - slots[0] != len(slots) - 1:
        return None
    return slice(slots[0], slots[-1] + 1)


def _choose_scored(
    prefill: Sequence[ScheduledChunk], firsts: Sequence[int] | np.ndarray, block_size: int
) -> tuple[list[int], list[PromptScore]]:
    """Return the packed tokens that score prompt tokens, and the span of each request; `firsts` are chunk starts.

    For a position before its chunk, whose hidden state is kept, the chunk's first token is a placeholder.
    """
    tokens: list[int] = []
    scores: list[PromptScore] = []
    for chunk, first in zip(prefill, firsts, strict=False):
        wanted = chunk.scoring
        if wanted is not None:
            rows = slice(len(tokens), len(tokens) + wanted.end - wanted.start)
            kept = chunk.block_ids[: wanted.kept_end // block_size]
            scores.append(PromptScore(chunk.request_id, rows, wanted.targets, wanted.top_n, kept, wanted.keeps))
            places = range(int(first) + wanted.start - chunk.start, int(first) + wanted.end - chunk.start)
            tokens += places if wanted.start >= chunk.start else (int(first), *places[1:])
    return tokens, scores
