"""RL-1, RL-7: updates on the first of two ranks, which has some rows of one weight; the other one's answers are given.

whole weight, [8, 2]:   rows 0 1 2 3 4 5 6 7
here, [4, 2]:                    2 3     6 7
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from megatron_ext.errors import ConfigError, WeightUpdateError
from megatron_ext.mcore import platform
from megatron_ext.mcore.checkpoint.weight_shards import Piece, ShardSpec
from megatron_ext.models.update import writer
from megatron_ext.models.update.shards import ShardOptions
from megatron_ext.parallel.parallel_context import ParallelContext
from tests.unit_tests.support.weights import writer_of

WHOLE = torch.arange(1.0, 17.0).view(8, 2)
HERE = WHOLE[[2, 3, 6, 7]]


def piece(first: int, here: int, count: int) -> Piece:
    columns = slice(0, 2)
    return Piece((slice(first, first + count), columns), (slice(here, here + count), columns))


class OtherRank(ParallelContext):
    """All ranks, of which the other one gives these answers."""

    def __init__(self, *answers: object) -> None:
        self._answers = iter(answers)

    def gather(self, one: object) -> list[object]:
        return [one, next(self._answers)]

    def broadcast(self, tensor: Tensor) -> None:
        """Leave the tensor as it is: it is this rank's."""


class Part:
    """Part of the model on this rank, all zeros; a model is asked for its shards when an update is made ready."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = nn.Linear(2, 4, bias=False).requires_grad_(False)
        self.model.weight.zero_()
        self.pieces = (piece(2, 0, 2), piece(6, 2, 2))
        self.others: dict[str, ShardSpec] = {}
        monkeypatch.setattr(writer, "model_shards", lambda _: {"weight": self.shard} | self.others)

    @property
    def shard(self) -> ShardSpec:
        return ShardSpec("weight", (8, 2), self.pieces)

    def lead(self, *answers: object) -> None:
        """Write the whole tensor; the other rank answers to its check, and after its writes."""
        given = {"weight": WHOLE} | {name: torch.ones(one.shape) for name, one in self.others.items()}
        writer_of(self.model, ranks=OtherRank({}, *answers)).write(given)

    def write(self, given: Tensor, *answers: object) -> None:
        """Write this rank's tensor; the other rank answers with its options, to its check, and after its writes."""
        context = OtherRank(*answers) if answers else None
        writer_of(self.model, ranks=context, source_is_gpt=False).write_shards({"weight": given}, ShardOptions())


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Part:
    return Part(monkeypatch)


def test_each_rank_writes_its_own_rows(part):
    part.lead(None, None)
    assert torch.equal(part.model.weight, HERE)


def test_nothing_is_written_before_all_ranks_have_checked(part):
    with pytest.raises(ConfigError, match="rank 1: no memory"):
        part.lead(ConfigError("no memory"), None)
    assert not part.model.weight.any()


def test_a_write_that_fails_on_another_rank_fails_here(part):
    with pytest.raises(WeightUpdateError, match="rank 1: a fault"):
        part.lead(None, "a fault")


def test_a_rank_that_is_lost_between_buckets_ends_the_update(part, monkeypatch):
    """RL-1: nothing more is sent to it: each message would wait for the time-out."""

    def lose(_: OtherRank, tensor: Tensor) -> None:
        sent.append(tensor)
        raise RuntimeError("connection closed by peer")

    sent: list[Tensor] = []
    monkeypatch.setattr(OtherRank, "broadcast", lose)
    monkeypatch.setattr(writer, "BUCKET_BYTES", 1)
    part.model.bias = nn.Parameter(torch.zeros(4))
    part.others = {"bias": ShardSpec("bias", (4,), (Piece((slice(0, 4),), (slice(0, 4),)),))}
    with pytest.raises(RuntimeError, match="closed by peer"):
        part.lead(None)
    assert len(sent) == 1
    assert not part.model.weight.any()


def test_all_pieces_of_a_shard_are_written(part):
    part.write(HERE)
    assert torch.equal(part.model.weight, HERE)


def test_shards_with_other_options_on_another_rank_are_refused(part):
    with pytest.raises(ConfigError, match="rank 1 gives weights_version=1, and the first rank None"):
        part.write(HERE, (ShardOptions(weights_version=1), None), None, None)
    assert not part.model.weight.any()


def test_a_dtensor_is_refused(part):
    """Its local part may have the right shape, and other rows than the engine's layout has here."""
    platform.initialize()
    given = DTensor.from_local(HERE, init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(ConfigError, match=r"weight is a DTensor; give its to_local\(\)"):
        part.write(given)
    assert not part.model.weight.any()
