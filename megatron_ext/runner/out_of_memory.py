"""Detection of failed allocations."""

from __future__ import annotations

import torch

from megatron_ext.errors import describe

# Messages of torch's CPU allocator, which raises a plain RuntimeError.
_CPU_ALLOCATOR = ("can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed: on the host, in torch's CPU allocator, or on the device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in describe(error) for words in _CPU_ALLOCATOR)
