"""M1-1 to M1-3: the Mamba-1 mixer in engine steps, token by token, in training, and in distributed checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_ext.mixers.mamba1 import Mamba1Mixer
from megatron_ext.mixers.recurrent import RecurrentStep
from megatron_ext.models.build import build_model
from megatron_ext.ops.state_slots import StateSlots
from tests.unit_tests.support.chunk_grid import cut_chunks, snapshot_places
from tests.unit_tests.support.driver import assert_states_close
from tests.unit_tests.support.mamba1 import recur_mamba1, slow_down_mamba1
from tests.unit_tests.support.models import MAMBA1

BLOCK, LENGTH = 32, 131
NORMS = ("none", "plain", "weighted")


def build(inner_norm: str = "none") -> Mamba1Mixer:
    config = dataclasses.replace(MAMBA1, hybrid_override_pattern="M", mamba_inner_norm=inner_norm)
    mixer = build_model(config, device=torch.device("cpu")).decoder.layers[0].mixer
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for matrix in (mixer.in_proj.weight, mixer.x_proj.weight, mixer.out_proj.weight):
            matrix.copy_(torch.randn(matrix.shape, generator=generator) * matrix.shape[1] ** -0.5)
        slow_down_mamba1(mixer, generator)
    return mixer


@functools.cache
def plain() -> Mamba1Mixer:
    return build()


@pytest.fixture(scope="module", params=NORMS)
def mixer(request: pytest.FixtureRequest) -> Mamba1Mixer:
    return build(request.param)


def hidden_states(length: int, seed: int = 1) -> Tensor:
    return torch.randn(length, MAMBA1.hidden_size, generator=torch.Generator().manual_seed(seed))


class Context:
    """Running states and snapshots of one layer, with NaN in unwritten places."""

    def __init__(self, mixer: Mamba1Mixer, rows: int, slots: int, block: int = BLOCK) -> None:
        self.block = block
        shapes = mixer.mamba_state_shapes_per_request()
        self.live = tuple(torch.full((rows, *shape), torch.nan) for shape in shapes)
        self.slots = tuple(torch.full((slots, *shape), torch.nan) for shape in shapes)
        self.recurrent_step: RecurrentStep | None = None

    def mamba_states_cache(self, layer_number: int) -> tuple[Tensor, Tensor]:
        return self.live

    def mamba_snapshots(self, layer_number: int) -> tuple[Tensor, Tensor]:
        return self.slots

    def stage(self, starts: list[int], lengths: list[int], decode_slots: tuple[int, ...] = ()) -> None:
        """Prefill of rows 0, 1, ...: sequence 0 leaves a snapshot at each block boundary, in the slot of its number."""
        ends = [end for end in range(self.block, starts[0] + lengths[0] + 1, self.block) if end > starts[0]]
        places = [(0, end - starts[0], end // self.block - 1, i) for i, end in enumerate(ends)]
        self.recurrent_step = RecurrentStep(
            num_decode=len(decode_slots),
            decode_slots=torch.tensor(decode_slots, dtype=torch.int64),
            chunks=cut_chunks(starts, lengths, self.block, "cpu"),
            prefill_slots=StateSlots(
                live=torch.arange(len(starts)),
                has_initial_state=torch.tensor([start > 0 for start in starts]),
                snapshots=snapshot_places(places, len(starts)),
            ),
        )


@torch.inference_mode()
def prefill(mixer: Mamba1Mixer, hidden: Tensor, cuts: list[int], other: int = 0) -> tuple[Tensor, Context]:
    """Output [T, h] of a sequence that is cut there, each piece beside `other` tokens of another sequence, if any."""
    context = Context(mixer, rows=2, slots=len(hidden) // BLOCK)
    outputs, edges = [], sorted({0, *cuts, len(hidden)})
    for start, end in itertools.pairwise(edges):
        context.stage([start, 0][: 1 + bool(other)], [end - start, other][: 1 + bool(other)])
        packed = torch.cat([hidden[start:end], hidden_states(other, seed=9)])
        y, _ = mixer(packed[:, None], context)
        outputs.append(y[: end - start, 0])
    return torch.cat(outputs), context


def test_prefill_equals_the_recurrence(mixer: Mamba1Mixer) -> None:
    """M1-1, M1-3: live states and every snapshot are those of the recurrence, and the batch path gives the outputs."""
    hidden = hidden_states(LENGTH)
    y, context = prefill(mixer, hidden, [])
    with torch.inference_mode():
        torch.testing.assert_close(y, mixer(hidden[:, None])[0][:, 0], atol=1e-5, rtol=1e-4)
    ends = [*range(BLOCK, LENGTH, BLOCK), LENGTH]
    kept = [tuple(pool[slot] for pool in context.slots) for slot in range(LENGTH // BLOCK)]
    for end, states in zip(ends, [*kept, tuple(pool[0] for pool in context.live)], strict=True):
        for state, truth, name in zip(states, recur_mamba1(mixer, hidden[:end]), ("conv", "ssm"), strict=True):
            assert_states_close(state, truth, f"{name} after {end} tokens")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, LENGTH - 1), max_size=6), other=st.sampled_from([0, 1, 45]))
def test_snapshots_do_not_depend_on_the_cuts(cuts: list[int], other: int) -> None:
    """M1-2, M1-3, HY-7, HY-8: the same states at every block's end, and the same outputs, wherever prefill was cut."""
    hidden = hidden_states(LENGTH)
    y, whole = prefill(plain(), hidden, [])
    cut_y, cut = prefill(plain(), hidden, cuts, other)
    torch.testing.assert_close(cut_y, y, atol=1e-4, rtol=1e-4)  # TE-1: products of other numbers of rows
    for pool, cut_pool in zip(whole.slots, cut.slots, strict=True):
        assert_states_close(cut_pool, pool, f"snapshots, cut at {cuts}")
    for pool, cut_pool in zip(whole.live, cut.live, strict=True):
        assert_states_close(cut_pool[0], pool[0], f"live states, cut at {cuts}")


def test_example_of_a_continuation() -> None:
    """M1-2: block 2048, 1866 tokens done, 1100 more: the state at 2048 is the snapshot, the one at 2966 is live."""
    hidden, context = hidden_states(2966), Context(plain(), rows=1, slots=1, block=2048)
    with torch.inference_mode():
        context.stage([0], [1866])
        assert context.recurrent_step.prefill_slots.snapshots is None
        plain()(hidden[:1866, None], context)
        context.stage([1866], [1100])
        assert context.recurrent_step.chunks.chunk_lengths == (182, 918)
        plain()(hidden[1866:, None], context)
        for pools, end in ((context.slots, 2048), (context.live, 2966)):
            for pool, truth in zip(pools, recur_mamba1(plain(), hidden[:end]), strict=True):
                assert_states_close(pool[0], truth, f"after {end} tokens")


def test_a_wrong_cut_is_seen() -> None:
    """Negative control: the second piece of a prompt is told that it begins a block."""
    hidden = hidden_states(LENGTH)
    _, whole = prefill(plain(), hidden, [])
    context = Context(plain(), rows=1, slots=LENGTH // BLOCK)
    with torch.inference_mode():
        context.stage([0], [40])
        plain()(hidden[:40, None], context)
        context.stage([BLOCK], [LENGTH - 40])
        plain()(hidden[40:, None], context)
    assert_states_close(context.slots[1][0], whole.slots[1][0])
    with pytest.raises(AssertionError, match="second block"):
        assert_states_close(context.slots[1][1], whole.slots[1][1], "second block")


def test_decode_continues_prefill(mixer: Mamba1Mixer) -> None:
    """M1-1: one token a step, in a batch with another sequence's prefill and with padding."""
    hidden = hidden_states(40)
    with torch.inference_mode():
        whole = mixer(hidden[:, None])[0][:, 0]
        _, context = prefill(mixer, hidden[:30], [])
        context.live = tuple(pool[[1, 1, 0]] for pool in context.live)
        for t in range(30, 40):
            context.stage([0, 0], [3, 2], decode_slots=(2,))
            padding = torch.full((3, hidden.shape[1]), torch.nan)
            packed = torch.cat([hidden[t : t + 1], hidden_states(5, seed=9), padding])
            y, _ = mixer(packed[:, None], context)
            torch.testing.assert_close(y[0, 0], whole[t], atol=1e-5, rtol=1e-4)
    for state, truth in zip(context.live, recur_mamba1(mixer, hidden), strict=True):
        assert_states_close(state[2], truth)


def test_gradients_reach_every_parameter() -> None:
    """M1-1: trainable; two sequences of a batch do not see each other."""
    mixer = build("weighted").train()
    hidden = torch.stack([hidden_states(50), hidden_states(50, seed=2)], dim=1)
    y, _ = mixer(hidden)
    alone, _ = mixer(hidden[:, 1:])
    torch.testing.assert_close(y[:, 1:], alone, atol=1e-5, rtol=1e-4)
    y.square().sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
