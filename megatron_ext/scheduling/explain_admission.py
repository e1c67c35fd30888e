"""Comparison of an admitted request with the prefix cache: why it skips this many tokens and not more (SI-5)."""

from __future__ import annotations

import dataclasses
from array import array

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.kept_data import DataKind
from megatron_ext.prefix_cache.matching import last_boundary, resume_position
from megatron_ext.scheduling.explanation import Explanation, MissReason
from megatron_ext.scheduling.kept_data import lacking_data
from megatron_ext.scheduling.plan import Admission
from megatron_ext.scheduling.request import Request

_LACKING = {DataKind.LOG_PROBS: MissReason.NO_LOG_PROBS, DataKind.ROUTING: MissReason.NO_ROUTING_INDICES}


def explain_admission(admission: Admission, cache: PrefixCache, block_size: int) -> None:
    """Store the explanation in the request's ledger on its first admission, before anything is allocated for it."""
    ledger = admission.request.ledger
    if ledger.explanation is None:
        ledger.explanation = _explain(admission, cache, block_size)


def note_end(request: Request, cache: PrefixCache, block_size: int) -> None:
    """Note where the final tokens of a request end, if explanations are on: later requests may continue it."""
    known, chain, tokens = cache.cached_token_ids, request.chain, request.tokens
    if known is not None and chain is not None and request.generated_count:  # its prompt was computed
        complete = (len(tokens) - 1) // block_size  # the last token never is
        known.keep_end(request.block_hashes[complete - 1] if complete else chain.root, tokens[complete * block_size :])


def _explain(admission: Admission, cache: PrefixCache, block_size: int) -> Explanation:
    request, matched, start = admission.request, len(admission.matched), admission.chunk.start
    if admission.chunk.source is not None:
        shared = admission.usable_blocks * block_size
        return Explanation(MissReason.SKIPPED_ALL.value, start, shared, start, block_size)
    length, ledger = len(request.tokens), request.ledger
    most = last_boundary(length, block_size)
    if cache.states is None:
        most = resume_position(length, length // block_size * block_size)
    known = cache.cached_token_ids
    age = known.age(request.block_hashes[matched - 1]) if known is not None and matched else None
    from_disk = ledger.skipped_from_disk
    blank = Explanation("", start, matched * block_size, most, block_size, age=age, from_disk=from_disk)
    if ledger.general_reason is not None:
        return dataclasses.replace(blank, reason=ledger.general_reason.value)
    if most == 0 or length < block_size:
        return dataclasses.replace(blank, reason=MissReason.TOO_SHORT.value)
    if start == most:
        return dataclasses.replace(blank, reason=MissReason.SKIPPED_ALL.value)
    if (lacking := lacking_data(request, matched, cache)) is not None:
        return dataclasses.replace(blank, reason=_LACKING[lacking].value)
    retokenized = request.inputs.retokenized
    if retokenized is not None and retokenized[0] // block_size == matched:
        found = _with_divergence(request, cache, blank, matched)
        nearest = found if found.agreeing == retokenized[0] else blank
        return dataclasses.replace(nearest, reason=MissReason.RETOKENIZED.value, agreeing=retokenized[0])
    goal = min(matched * block_size, most)
    if start < goal:
        return _with_divergence(request, cache, _without_states(request, cache, blank, goal), matched)
    return _after_match(request, cache, blank, matched)


def _without_states(request: Request, cache: PrefixCache, blank: Explanation, goal: int) -> Explanation:
    """Explain a resume position before `goal`: the blocks up to there are cached, and no snapshot is."""
    assert cache.states is not None, "without recurrent layers nothing else is needed"
    if cache.states.total == 0:
        return dataclasses.replace(blank, reason=MissReason.NO_SLOTS.value)
    size = blank.block_size
    ago = cache.eviction_history.snapshot_ago(request.block_hashes[blank.skipped // size : goal // size])
    reason = MissReason.NO_SNAPSHOT if ago is None else MissReason.SNAPSHOT_GIVEN_UP
    return dataclasses.replace(blank, reason=reason.value, ago=ago)


def _after_match(request: Request, cache: PrefixCache, blank: Explanation, matched: int) -> Explanation:
    """Explain why no more matched, given that everything that matched was skipped."""
    block_hashes = request.block_hashes
    if matched < len(block_hashes):
        ago = cache.eviction_history.block_ago(block_hashes[matched])
        if ago is not None:
            return dataclasses.replace(blank, reason=MissReason.BLOCK_EVICTED.value, ago=ago)
    found = _with_divergence(request, cache, blank, matched)
    known, size = cache.cached_token_ids, blank.block_size
    ended = None if known is None else known.earlier_end(*_next_block(request, matched, size))
    if ended is not None and matched * size + ended.agreeing >= (found.agreeing or 0):
        return dataclasses.replace(
            blank, reason=MissReason.TURN_ENDED.value, agreeing=matched * size + ended.agreeing, age=ended.age
        )
    reason = MissReason.NOT_CACHED if found.agreeing is None else MissReason.PARTED
    return dataclasses.replace(found, reason=reason.value)


def _with_divergence(request: Request, cache: PrefixCache, blank: Explanation, matched: int) -> Explanation:
    """Add where the tokens part from the nearest cached prefix after the match, if one continues from there."""
    size, known = blank.block_size, cache.cached_token_ids
    divergence = None if known is None else known.divergence(*_next_block(request, matched, size))
    agreeing = matched * size + (0 if divergence is None else divergence.agreeing)
    if divergence is None or agreeing == 0 or agreeing == len(request.tokens):
        return blank
    here = request.tokens[agreeing]
    return dataclasses.replace(blank, agreeing=agreeing, here=here, there=divergence.there, age=divergence.age)


def _next_block(request: Request, matched: int, block_size: int) -> tuple[BlockHash, array[int]]:
    """Return the hash before the first block that did not match, and that block's tokens."""
    chain = request.chain
    assert chain is not None, "it reads the cache"
    before = request.block_hashes[matched - 1] if matched else chain.root
    return before, request.tokens[matched * block_size : (matched + 1) * block_size]
