"""SE-1: files of a distributed checkpoint are read within limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.errors import CheckpointError
from megatron_ext.mcore.checkpoint.checkpoint_files import read_common_state
from megatron_ext.mcore.checkpoint.checkpoint_metadata import FileRange, StoredState


def test_a_common_state_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    """SE-1: an object of later versions; there is no file."""
    stored = StoredState({}, {"common_state/shard_0_1": FileRange("__0_0.distcp", 0, 2**27)})
    with pytest.raises(CheckpointError, match="has 134217728 bytes and must have at most 67108864"):
        read_common_state(tmp_path, stored)
