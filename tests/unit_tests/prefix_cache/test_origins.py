"""Origins of cached entries: tokens that are skipped because of entries put back from disk."""

from __future__ import annotations

import pytest

from megatron_ext.prefix_cache.origins import DiskOrigins

HASHES = [bytes([number]) * 32 for number in range(4)]


def made(blocks: list[int], snapshots: list[int]) -> DiskOrigins:
    origins = DiskOrigins()
    origins.add_blocks(HASHES[number] for number in blocks)
    for number in snapshots:
        origins.add_snapshot(HASHES[number])
    return origins


@pytest.mark.parametrize(
    ("blocks", "snapshots", "restored", "start", "end", "expected"),
    [
        ([], [], None, 0, 16, 0),
        ([0, 1], [], None, 0, 16, 8),
        ([0, 1, 2, 3], [], None, 0, 15, 15),  # the last token is computed in any case
        ([0, 1, 2, 3], [], None, 6, 15, 9),  # tokens before were counted at an earlier admission
        ([1, 3], [], 3, 3, 14, 6),  # the snapshot was taken by this process
        ([1], [3], 3, 0, 16, 16),  # without the snapshot nothing could be skipped
        ([0], [1], 3, 0, 16, 4),
        ([], [3], 3, 16, 16, 0),
        ([], [3], 3, 17, 16, 0),
    ],
)
def test_tokens(blocks, snapshots, restored, start, end, expected):
    """DC-1."""
    restored = None if restored is None else HASHES[restored]
    assert made(blocks, snapshots).tokens(HASHES, restored, start, end, 4) == expected


def test_what_leaves_memory_has_no_origin():
    origins = made([0, 1, 2], [1, 2])
    origins.check(HASHES, HASHES)
    origins.drop_blocks([HASHES[2], HASHES[3]])
    origins.drop_snapshot(HASHES[2])
    origins.check(HASHES[:2], HASHES[1:2])
    assert origins.tokens(HASHES, HASHES[2], 0, 16, 4) == 8
    with pytest.raises(AssertionError):
        origins.check(HASHES[:1], HASHES)
    with pytest.raises(AssertionError):
        origins.check(HASHES, [])
    origins.clear()
    origins.check([], [])
