"""Leaders and followers: requests that compute the block that a waiting request needs next (KV-6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.matching import last_boundary, resume_point
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.counters import Counters
from megatron_ext.scheduling.kept_data import lacking_data
from megatron_ext.scheduling.plan import Admission, Deferral, SchedulerLimits, SnapshotRequest, StepBudget
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.snapshots.snapshot_positions import common_blocks


class PendingBlocks:
    """Block hashes that running prefills are about to publish.

    A waiting request whose next block is among them follows the request that computes it: the follower waits, other
    requests overtake it, and then it hits the cache. When the leader ends in any way, its block hashes are removed, and
    the first follower computes them itself.
    """

    def __init__(self) -> None:
        self._leaders: dict[BlockHash, int] = {}  # the first request that computes each block
        self._others: dict[BlockHash, list[int]] = {}  # later ones, in order of admission
        self._block_hashes: dict[int, set[BlockHash]] = {}

    def add(self, request_id: int, block_hashes: Sequence[BlockHash]) -> None:
        """Register blocks that `request_id` begins to compute."""
        if not block_hashes:
            return
        own = self._block_hashes.setdefault(request_id, set())
        led = self._leaders.keys() & block_hashes
        for block_hash in led - own:
            self._others.setdefault(block_hash, []).append(request_id)
        unled = [block_hash for block_hash in block_hashes if block_hash not in led] if led else block_hashes
        self._leaders.update(dict.fromkeys(unled, request_id))
        own.update(block_hashes)

    def published(self, request_id: int, block_hashes: Sequence[BlockHash]) -> None:
        """Remove blocks that `request_id` has computed and published."""
        own = self._block_hashes.get(request_id)
        if own:
            self._forget(request_id, own.intersection(block_hashes))

    def discard(self, request_id: int) -> None:
        """Remove all blocks of `request_id`, which computes nothing any more."""
        if request_id in self._block_hashes:
            self._forget(request_id, set(self._block_hashes[request_id]))

    def _forget(self, request_id: int, block_hashes: set[BlockHash]) -> None:
        leaders, own = self._leaders, self._block_hashes[request_id]
        shared = self._others.keys() & block_hashes
        for block_hash in shared:
            self._step_back(request_id, block_hash)
        for block_hash in block_hashes - shared if shared else block_hashes:
            del leaders[block_hash]
        own -= block_hashes
        if not own:
            del self._block_hashes[request_id]

    def _step_back(self, request_id: int, block_hash: BlockHash) -> None:
        """Remove one of several requests that compute `block_hash`."""
        others = self._others[block_hash]
        if self._leaders[block_hash] == request_id:
            self._leaders[block_hash] = others.pop(0)
        else:
            others.remove(request_id)
        if not others:
            del self._others[block_hash]

    def leader(self, block_hash: BlockHash) -> int | None:
        """Return the first request that computes `block_hash`; None if no request does."""
        return self._leaders.get(block_hash)

    def computes(self, request_id: int, block_hash: BlockHash) -> bool:
        """Return whether `request_id` is about to publish `block_hash`."""
        return block_hash in self._block_hashes.get(request_id, ())

    def requests(self) -> set[int]:
        """Return the ids of requests that compute blocks that others could wait for."""
        return set(self._block_hashes)


class PrefixLeaders:
    """Leaders in one plan: running requests, and requests that this step admits."""

    def __init__(self, running: Iterable[Request], pending_blocks: PendingBlocks) -> None:
        self.running = {request.request_id: request for request in running}
        self._pending_blocks = pending_blocks
        self._planned: dict[BlockHash, Chunk] = {}

    def add(self, admission: Admission) -> None:
        """Register the blocks that an admitted request did not match and is about to compute."""
        block_hashes = admission.request.block_hashes[len(admission.matched) :]
        self._planned |= dict.fromkeys(block_hashes, admission.chunk)

    def of(self, request: Request, matched: int) -> tuple[Request, int] | None:
        """Return the leader of the first block that `request` lacks, and the leader's computed end before this step."""
        if matched == len(request.block_hashes):
            return None
        following = request.block_hashes[matched]
        if following in self._planned:
            chunk = self._planned[following]
            return chunk.request, chunk.start
        request_id = self._pending_blocks.leader(following)
        if request_id is None:
            return None
        leader = self.running[request_id]
        return leader, leader.computed_end

    def disturbed(self, admitted: Request, leaders: Iterable[int]) -> list[int]:
        """Return the `leaders` whose followers may have to follow the newly `admitted` request instead.

        These are the leaders that have their next block in common with `admitted`. With recurrent layers, the states of
        `admitted` may be of more or less use to a follower than its leader's states.
        """
        found = []
        for request_id in leaders:
            leader = self.running[request_id]
            following = slice(leader.published_blocks, leader.published_blocks + 1)
            block_hashes = leader.block_hashes[following]
            if len(block_hashes) == 1 and admitted.block_hashes[following] == block_hashes:
                found.append(request_id)
        return found


def wait_for_prefix(
    request: Request,
    matched: int,
    leader: tuple[Request, int],
    limits: SchedulerLimits,
    budget: StepBudget,
    cache: PrefixCache,
    requested: Collection[BlockHash],
) -> Deferral | None:
    """Return a deferral until the leader has computed the common prefix; None if waiting saves nothing.

    With recurrent layers, waiting saves something if the leader has yet to pass the last boundary in common, and a slot
    for the states there is available.
    """
    leading, computed_end = leader
    if needed := request.needed_data:
        leaves_less = not set(needed).issubset(leading.needed_data)
        if leaves_less or lacking_data(request, matched, cache) is not None:
            return None
    block_size = limits.block_size
    block_hashes = request.block_hashes
    common = common_blocks(block_hashes, leading.block_hashes) * block_size
    deferral = Deferral(request, "prefix", 1, 0, wait_for=leading.request_id, until=common)
    if cache.states is None:
        return deferral
    position = min(common, last_boundary(len(request.tokens), block_size))
    resume = resume_point(len(request.tokens), block_hashes[:matched], block_size, cache.states, cache.depth_of)
    if position <= max(computed_end, resume.position):
        return None
    deferral = dataclasses.replace(deferral, until=position)
    block_hash = block_hashes[position // block_size - 1]
    if cache.states.is_reserved(block_hash):
        return deferral
    if block_hash not in requested and budget.slots < 1:
        return None
    return dataclasses.replace(deferral, snapshot=SnapshotRequest(leading, position, block_hash))


def is_lasting(
    deferral: Deferral, leader: Request, blocks: int, cache: PrefixCache, pending_blocks: PendingBlocks
) -> bool:
    """Return whether `deferral` holds until its leader publishes its block number `blocks`, or leaves.

    The leader's blocks before that are in use, so they cannot be evicted; as long as the leader computes the last of
    them, it computes the next block that the follower lacks.

    With recurrent layers, another leader would change the decision. There the deferral holds if the leader is the first
    request that computes the follower's next block, if the follower has matched only blocks that the leader owns
    (others could be evicted, and then another request would lead), and if a snapshot of the states is planned.
    """
    block_hashes = deferral.request.block_hashes
    block_hash = block_hashes[blocks - 1]
    is_computed = pending_blocks.computes(leader.request_id, block_hash)
    if cache.states is None:
        return is_computed
    matched = len(cache.match(block_hashes))
    return (
        matched < len(block_hashes)
        and pending_blocks.leader(block_hashes[matched]) == leader.request_id
        and leader.published_blocks == matched
        and cache.states.is_reserved(block_hash)
        and (is_computed or any(one.block_hash == block_hash for one in leader.snapshots))
    )


def put_to_sleep(
    deferrals: Iterable[Deferral], queues: Queues, block_size: int, cache: PrefixCache, pending_blocks: PendingBlocks
) -> None:
    """Let followers sleep whose deferrals hold until their leader progresses."""
    leaders = {request.request_id: request for request in queues.running}
    for deferral in deferrals:
        request = deferral.request
        if deferral.until is None or deferral.wait_for is None or queues.waiting.is_asleep(request):
            continue
        blocks = deferral.until // block_size
        if is_lasting(deferral, leaders[deferral.wait_for], blocks, cache, pending_blocks):
            queues.waiting.order.rank(request, deferral.until)  # once it wakes
            queues.waiting.sleep(request, deferral.wait_for, request.block_hashes[blocks - 1], blocks)


def note_followers(deferrals: Iterable[Deferral], counters: Counters) -> None:
    """Count requests that wait for another request's prefix, each of them once."""
    for deferral in deferrals:
        timeline = deferral.request.timeline
        if deferral.wait_for is not None and not timeline.has_waited_for_prefix:
            timeline.has_waited_for_prefix = True
            counters.coordination_waits += 1


def check_sleepers(queues: Queues, block_size: int, cache: PrefixCache, pending_blocks: PendingBlocks) -> None:
    """Assert that every sleeping request waits for blocks or states that are about to be published."""
    queues.waiting.check()
    running = {request.request_id: request for request in queues.running}
    for request, prefix_wait in queues.waiting.sleepers():
        name, leader = f"sleeping {request.request_id}", running.get(prefix_wait.leader)
        assert leader is not None, f"{name} waits for a request that does not run"
        assert leader.cache_epoch == cache.epoch, f"{name} waits for a block that will not be published"
        assert leader.computed_end < prefix_wait.blocks * block_size, f"{name} waits for a block that is cached"
        assert request.block_hashes[prefix_wait.blocks - 1] == prefix_wait.block_hash, (
            f"{name} waits for another sequence's block"
        )
        if cache.states is None:
            assert pending_blocks.computes(prefix_wait.leader, prefix_wait.block_hash), (
                f"{name} waits for a block that no request computes"
            )
        else:
            assert cache.states.is_reserved(prefix_wait.block_hash), f"{name} waits for states that no request saves"
