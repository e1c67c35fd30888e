"""What kernels call: functions that run on the device. Needs triton, as kernels do."""

import triton
import triton.language as tl

NEVER = tl.constexpr(2**30)
"""More tokens than a step has."""


@triton.jit
def next_kept(kept_sequences, kept_tokens, kept, sequence, after):
    """The first place behind `after`, in tokens of the packed step, whose state of this sequence is to be kept.

    NEVER if there is none. The lists, of `kept` places, are those of `SnapshotPlaces`, in any order.
    """
    found = NEVER
    for i in range(kept):
        tokens = tl.load(kept_tokens + i).to(tl.int32)
        is_candidate = (tl.load(kept_sequences + i) == sequence) & (tokens > after) & (tokens < found)
        found = tl.where(is_candidate, tokens, found)
    return found


@triton.jit
def store_kept(
    snapshots, snapshot_row, state, cell, is_state, kept_slots, kept_sequences, kept_tokens, kept, sequence, tokens
):
    """Write a sequence's state behind so many tokens of the packed step to the slots that are to keep it.

    `cell` says where its elements lie in a slot; padding, a slot of -1, is left out.
    """
    for i in range(kept):
        is_here = (tl.load(kept_sequences + i) == sequence) & (tl.load(kept_tokens + i) == tokens)
        slot = tl.load(kept_slots + i)
        if is_here & (slot >= 0):
            target = snapshots + slot * snapshot_row + cell
            tl.store(target, state.to(snapshots.dtype.element_ty), mask=is_state)
