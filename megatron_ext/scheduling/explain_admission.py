"""Comparison of an admitted request with the prefix cache: why it skips this many tokens and not more (SI-5)."""

from __future__ import annotations

import dataclasses
from array import array

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.kept_data import DataKind
from megatron_ext.prefix_cache.matching import last_boundary, resume_position
from megatron_ext.scheduling.accounting import general_reason
from megatron_ext.scheduling.admission_counts import tokens_from_disk
from megatron_ext.scheduling.explanation import Explanation, Why
from megatron_ext.scheduling.kept_data import lacking_data
from megatron_ext.scheduling.plan import Admission
from megatron_ext.scheduling.request import Request

_LACKING = {DataKind.LOG_PROBS: Why.NO_LOG_PROBS, DataKind.ROUTING: Why.NO_ROUTING_INDICES}


def explain_admission(admission: Admission, cache: PrefixCache, block_size: int) -> None:
    """Store the explanation in the request's ledger on its first admission."""
    ledger = admission.request.sequence.ledger
    if ledger.explanation is not None:
        return
    if admission.chunk.source is not None:
        length, shared = admission.chunk.start, admission.usable_blocks * block_size
        ledger.explanation = Explanation(Why.SKIPPED_ALL.value, length, shared, length, block_size)
    else:
        matched, start = len(admission.matched), admission.chunk.start
        found = explain(admission.request, cache, matched, start, block_size)
        ledger.explanation = dataclasses.replace(found, from_disk=tokens_from_disk(admission, cache, block_size))


def note_end(request: Request, cache: PrefixCache, block_size: int) -> None:
    """Note where the final tokens of a request end, to explain those that continue it, if explanations are on."""
    known, chain, tokens = cache.cached_token_ids, request.sequence.chain, request.sequence.tokens
    if known is not None and chain is not None and request.generated_count:  # its prompt was computed
        complete = (len(tokens) - 1) // block_size  # the last token never is
        known.keep_end(request.block_hashes[complete - 1] if complete else chain.root, tokens[complete * block_size :])


def explain(request: Request, cache: PrefixCache, matched: int, start: int, block_size: int) -> Explanation:
    """Explain the admission of a request, before anything is allocated for it.

    Args:
        request: Request that is admitted now.
        cache: Prefix cache in its present state.
        matched: Cached blocks that the request shares.
        start: Resume position of the request.
        block_size: Tokens of a block.
    """
    length = len(request.tokens)
    most = last_boundary(length, block_size)
    if cache.states is None:
        most = resume_position(length, length // block_size * block_size)
    known = cache.cached_token_ids
    age = known.age(request.block_hashes[matched - 1]) if known is not None and matched else None
    blank = Explanation("", start, matched * block_size, most, block_size, age=age)
    keeps = request.kept.keeps_log_probs
    general = general_reason(request.params, is_caching=cache.is_enabled, keeps_log_probs=keeps)
    if general is not None:
        return dataclasses.replace(blank, reason=general.value)
    if most == 0 or length < block_size:
        return dataclasses.replace(blank, reason=Why.TOO_SHORT.value)
    if start == most:
        return dataclasses.replace(blank, reason=Why.SKIPPED_ALL.value)
    if (lacking := lacking_data(request, matched, cache)) is not None:
        return dataclasses.replace(blank, reason=_LACKING[lacking].value)
    goal = min(matched * block_size, most)
    if start < goal:
        return _with_divergence(request, cache, _without_states(request, cache, blank, goal), matched)
    return _after_match(request, cache, blank, matched)


def _without_states(request: Request, cache: PrefixCache, blank: Explanation, goal: int) -> Explanation:
    """Explain a resume position before `goal`: the blocks up to there are cached, and no snapshot is."""
    assert cache.states is not None, "without recurrent layers nothing else is needed"
    if cache.states.total == 0:
        return dataclasses.replace(blank, reason=Why.NO_SLOTS.value)
    size = blank.block_size
    gone = cache.ghosts.last_snapshot(request.block_hashes[blank.skipped // size : goal // size])
    if gone is None:
        return dataclasses.replace(blank, reason=Why.NO_SNAPSHOT.value)
    short = gone.slots_short if cache.border is None else None  # else snapshots go for blocks, too
    return dataclasses.replace(blank, reason=Why.SNAPSHOT_GIVEN_UP.value, ago=gone.ago, slots_short=short)


def _after_match(request: Request, cache: PrefixCache, blank: Explanation, matched: int) -> Explanation:
    """Explain why no more matched, given that everything that matched was skipped."""
    block_hashes = request.block_hashes
    if matched < len(block_hashes):
        ago = cache.ghosts.block_ago(block_hashes[matched])
        if ago is not None:
            return dataclasses.replace(blank, reason=Why.BLOCK_EVICTED.value, ago=ago)
    found = _with_divergence(request, cache, blank, matched)
    known, size = cache.cached_token_ids, blank.block_size
    ended = None if known is None else known.earlier_end(*_next_block(request, matched, size))
    if ended is not None and matched * size + ended.agreeing >= (found.agreeing or 0):
        return dataclasses.replace(
            blank, reason=Why.TURN_ENDED.value, agreeing=matched * size + ended.agreeing, age=ended.age
        )
    reason = Why.NOT_CACHED if found.agreeing is None else Why.PARTED
    return dataclasses.replace(found, reason=reason.value)


def _with_divergence(request: Request, cache: PrefixCache, blank: Explanation, matched: int) -> Explanation:
    """Add where the tokens part from the nearest cached prefix after the match, if one continues from there."""
    size, known = blank.block_size, cache.cached_token_ids
    divergence = None if known is None else known.divergence(*_next_block(request, matched, size))
    agreeing = matched * size + (0 if divergence is None else divergence.agreeing)
    if divergence is None or agreeing == 0 or agreeing == len(request.tokens):
        return blank
    here = request.sequence.tokens[agreeing]
    return dataclasses.replace(blank, agreeing=agreeing, here=here, there=divergence.there, age=divergence.age)


def _next_block(request: Request, matched: int, block_size: int) -> tuple[BlockHash, array[int]]:
    """Return the hash before the first block that did not match, and that block's tokens."""
    chain = request.sequence.chain
    assert chain is not None, "it reads the cache"
    before = request.block_hashes[matched - 1] if matched else chain.root
    return before, request.sequence.tokens[matched * block_size : (matched + 1) * block_size]
