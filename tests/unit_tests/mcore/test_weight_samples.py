"""Writes of an attached model's weights that no counter shows are errors after an idle second."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from megatron_ext.errors import SilentWeightChange
from megatron_ext.mcore.core_factory import ContextResources
from megatron_ext.mcore.weight_changes import WeightSamples, keep_samples


class Attached:
    """An attached layer, whose engine has packed copies of some bytes, and a clock."""

    def __init__(self, copies: int = 0) -> None:
        self.seconds = 100.0
        self.model = nn.Linear(4, 4)
        keep_samples(self.model, WeightSamples(dict(self.model.named_parameters()), self.model, lambda: self.seconds))
        controller = mock.Mock(packed=mock.Mock(bytes_held_twice=copies))
        controller.inference_wrapped_model.model = self.model
        self.resources = ContextResources(mock.Mock(recorded_steps=None, cuda_graph_runner=None), controller)

    def is_refused(self, *, is_caching: bool = True, seconds: float = 1.5) -> bool:
        """Return whether a check after some idle seconds finds a silent write."""
        self.seconds += seconds
        try:
            self.resources.check_weights(is_caching=is_caching)
        except SilentWeightChange:
            return True
        return False


@pytest.mark.parametrize(
    ("check", "copies", "is_refused"),
    [
        ({}, 0, True),
        ({"seconds": 0.9}, 0, False),
        ({"is_caching": False}, 0, False),
        ({"is_caching": False}, 64, True),
    ],
    ids=["idle", "busy", "nothing kept", "packed copies"],
)
def test_silent_writes_are_refused(check, copies, is_refused):
    attached = Attached(copies)
    attached.model.weight.data.mul_(2)
    assert attached.is_refused(**check) is is_refused


def test_edits_that_are_counted_are_no_silent_writes():
    attached = Attached()
    with torch.no_grad():
        attached.model.weight.mul_(2)
    assert not attached.is_refused()
    assert attached.resources.has_new_weights()
    assert not attached.is_refused()


def test_writes_between_a_suspension_and_the_resumption_are_followed():
    attached = Attached()
    attached.resources.free()
    attached.model.weight.data.mul_(2)
    attached.resources.allocate()
    assert not attached.is_refused()


def test_silent_writes_after_a_resumption_that_failed_are_refused():
    """RL-6: what was cached before the suspension is back, and the next attempt allocates nothing."""
    attached = Attached()
    attached.resources.free(offloads=True)
    attached.resources.allocate()
    attached.model.weight.data.mul_(2)
    attached.resources.allocate()
    assert attached.is_refused()
