"""RL-1: memory that an update takes beside the given tensors: that of the largest one, or of one bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.mcore.checkpoint.weight_shards import model_tensors
from megatron_ext.models.update import writer
from megatron_ext.models.update.disk import NewWeights
from megatron_ext.models.update.shards import ShardOptions
from megatron_ext.parallel.commands import UpdateWeights
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.weights import writer_of

BUCKET = 40_000


class Peak(TorchDispatchMode):
    """Largest sum of bytes of the storages that operations have made and that are alive together.

    Args:
        known: Tensors whose storages do not count.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.bytes = 0
        self._known = {one.untyped_storage()._cdata for one in known}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None):
        made = function(*args, **kwargs or {})
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in self._known:
                storage = one.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._alive.values()))
        return made


def whole_tensors(model: nn.Module, new: dict[str, Tensor]) -> None:
    writer_of(model).write(new)


def with_a_copy(model: nn.Module, new: dict[str, Tensor]) -> None:
    writer_of(model).write(new, keep_old=True)


def shards(model: nn.Module, new: dict[str, Tensor]) -> None:
    writer_of(model).write_shards(new, ShardOptions())


def checkpoint(model: nn.Module, new: dict[str, Tensor]) -> None:
    NewWeights(model, new).write()


def buckets(model: nn.Module, new: dict[str, Tensor]) -> None:
    """Update as a rank that receives the tensors."""
    alone = SimpleNamespace(ask_all=lambda ask: [ask()], broadcast=lambda tensor: tensor.zero_())
    weights = writer_of(model, ranks=alone)
    weights.shapes()
    tensors = tuple((name, tuple(one.shape), "float32") for name, one in new.items())
    weights.obey(UpdateWeights(tensors, partial=False, keep_old=False))


@pytest.mark.parametrize(
    ("update", "most"),
    [(whole_tensors, "tensor"), (shards, "nothing"), (checkpoint, "tensor"), (buckets, "bucket"), (with_a_copy, "all")],
)
def test_additional_memory(update: Callable, most: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """RL-1: names of the limits: nothing, the largest tensor, one bucket; a kept copy takes all, which shows here."""
    monkeypatch.setattr(writer, "BUCKET_BYTES", BUCKET)
    model = build_slow_decay(CONFIGS["hybrid"])
    new = {name: 2 * one.detach() for name, one in model_tensors(model).items()}
    sizes = [one.nbytes for one in new.values()]
    given = {name: one.double() for name, one in new.items()} if update is whole_tensors else new
    with Peak([*model_tensors(model).values(), *given.values()]) as peak:
        update(model, given)
    limits = {"nothing": 0, "tensor": max(sizes), "bucket": max(BUCKET, max(sizes)), "all": sum(sizes)}
    assert 3 * limits["bucket"] < limits["all"]
    if most == "all":
        assert peak.bytes >= limits[most]
    else:
        assert peak.bytes <= limits[most]
