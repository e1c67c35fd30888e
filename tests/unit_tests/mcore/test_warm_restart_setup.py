"""DC-2: the identity of a cache on disk."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch

from megatron_ext.mcore.warm_restart_setup import cache_identity


def test_another_model_finds_nothing():
    """DC-2: other tokens, other weights, another rank's part."""
    controller = mock.Mock(chosen_operators=dict)
    wrapped = controller.inference_wrapped_model
    wrapped.inference_context.plan = SimpleNamespace(fingerprint=b"plan", limits=SimpleNamespace(block_size=16))
    wrapped.model.parameters = lambda: iter([torch.zeros(1)])
    models = [[b"tokens", b"weights", b"part"]]
    models += [[*models[0][:place], b"other", *models[0][place + 1 :]] for place in range(3)]
    assert len({cache_identity(controller, model) for model in models}) == len(models)
