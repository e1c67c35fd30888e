"""SP-10: which hidden states of a request are kept."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_ext.mcore import hidden_states
from megatron_ext.mcore.hidden_states import HiddenStates
from megatron_ext.runner.cuda_graphs.input_batch import DUMMY_REQUEST

WIDTH = 3


class Stack(nn.Module):
    def forward(self, states):
        return states


@pytest.fixture
def made(monkeypatch):
    """Hidden states of a model of nothing, two requests of six tokens each, and a function that computes a step."""
    monkeypatch.setattr(hidden_states, "KEPT_TOKENS", 6)
    model, context = nn.Module(), SimpleNamespace(step=None)
    model.decoder, model.config = Stack(), SimpleNamespace(hidden_size=WIDTH)
    model.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
    kept = HiddenStates(model, context, requests=2)

    def compute(*chunks: tuple[int, int, int], round_: int = 0) -> None:
        named = [SimpleNamespace(request_id=i, start=s, end=e, length=e - s) for i, s, e in chunks]
        context.step = SimpleNamespace(chunks=named)
        rows = [[1000.0 * round_ + 100 * i + p] * WIDTH for i, s, e in chunks for p in range(s, e)]
        model.decoder(torch.tensor([*rows, [-1.0] * WIDTH])[:, None])  # and padding
        context.step = None

    return kept, compute, model


def read(kept: HiddenStates, *wanted: tuple[int, range]) -> list[int]:
    return kept.read(wanted)[:, 0].int().tolist()


def test_the_last_ones_are_kept(made):
    """SP-10: of chunks of any length, and of each request."""
    kept, compute, _ = made
    compute((1, 0, 2), (2, 0, 10))
    assert (kept.kept(1), kept.kept(2), kept.kept(3)) == (range(2), range(4, 10), range(0))
    compute((1, 2, 3), (2, 10, 12))
    assert (kept.kept(1), kept.kept(2)) == (range(3), range(6, 12))
    assert read(kept, (2, range(7, 12)), (1, range(1, 3))) == [207, 208, 209, 210, 211, 101, 102]


def test_rejected_drafts_are_overwritten(made):
    """SP-10: the next chunk begins inside of what is kept; after a gap it begins anew."""
    kept, compute, _ = made
    compute((1, 0, 5))
    compute((1, 3, 4), round_=1)
    assert kept.kept(1) == range(4)
    assert read(kept, (1, range(4))) == [100, 101, 102, 1103]
    compute((1, 9, 11))
    assert kept.kept(1) == range(9, 11)
    compute((1, 2, 4))
    assert kept.kept(1) == range(2, 4)


def test_captured_steps(made):
    """SP-12: they write through rows that are set before; padding, a failed step and a capture change nothing."""
    kept, compute, model = made
    compute((1, 0, 3), (2, 0, 2))
    captured = HiddenStates(model, SimpleNamespace(step=None), requests=2, captured_tokens=6)
    chunks = [SimpleNamespace(request_id=name, start=0, end=2, length=2) for name in (1, 2)]
    dummy = SimpleNamespace(request_id=DUMMY_REQUEST, start=0, end=1, length=1)
    step = SimpleNamespace(chunks=(), paged_batch=SimpleNamespace(has_static_shapes=True))

    def replay(first: float) -> None:
        captured._context.step = step
        model.decoder(torch.arange(first, first + 6)[:, None, None].expand(6, 1, WIDTH))
        captured._context.step = None

    with captured.writing([chunks[0], dummy, chunks[1]]):
        replay(10.0)
        assert not captured.kept(1), "the step may fail yet"
    replay(20.0)
    assert captured.kept(1) == captured.kept(2) == range(2)
    assert read(captured, (1, range(2)), (2, range(2))) == [10, 11, 13, 14]
    assert read(kept, (1, range(3))) == [100, 101, 102]


def test_the_model_is_left_as_it_was(made):
    """SP-10: no hook stays when the drafter is gone."""
    _, _, model = made
    hooks = model.decoder._forward_hooks
    assert len(hooks) == 1
    kept = HiddenStates(model, SimpleNamespace(step=None), requests=1)
    assert len(hooks) == 2
    del kept
    gc.collect()
    assert len(hooks) == 1
