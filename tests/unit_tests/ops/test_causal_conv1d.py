"""The causal convolution against its formula, token by token in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_ext.ops.causal_conv1d.reference import causal_conv1d, causal_conv1d_step, conv_states_after
from megatron_ext.ops.varlen import PackedChunks, pack_chunks
from tests.unit_tests.ops.oracles import LENGTHS, assert_close, assert_states_close, convolution

CHANNELS = 6


def random_inputs(lengths: Sequence[int], window: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """x, weight, bias, initial states."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), CHANNELS), (CHANNELS, window), (CHANNELS,), (len(lengths), CHANNELS, window - 1)]
    return tuple(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def whole(lengths: Sequence[int], device: str = "cpu") -> PackedChunks:
    """Sequences of a chunk each."""
    return pack_chunks([[length] for length in lengths], device)


@pytest.mark.parametrize("window", [1, 2, 4, 5])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_equals_formula(lengths: tuple[int, ...], window: int) -> None:
    """HY-11, HY-8, FX-4: states per sequence; sequences shorter than the window carry older columns over."""
    x, weight, bias, initial = random_inputs(lengths, window)
    y, final, _ = causal_conv1d(x, weight, bias, whole(lengths), initial_states=initial)
    want_y, want_final = convolution(x, weight, bias, lengths, initial)
    assert_close("y", y, want_y, atol=1e-5)
    assert_states_close("final states", final, want_final)


@pytest.mark.parametrize("lengths", [(1,), (3,), (65,), (2, 65, 1)], ids=str)
def test_without_states_and_bias(lengths: tuple[int, ...]) -> None:
    """FX-4: zeros stand before a sequence that has no state, also in its final state."""
    x, weight, _, _ = random_inputs(lengths)
    y, final, _ = causal_conv1d(x, weight, None, whole(lengths))
    want_y, want_final = convolution(x, weight, None, lengths)
    assert_close("y", y, want_y, atol=1e-5)
    assert_states_close("final states", final, want_final)


@pytest.mark.parametrize("cuts", [[1] * 12, [2, 3, 1, 6], [11, 1], [1, 11]], ids=str)
def test_any_slicing_equals_one_pass(cuts: list[int]) -> None:
    """HY-8, FX-4: slices shorter than the window, one after the other, give equal results."""
    x, weight, bias, initial = random_inputs([12])
    whole_y, whole_state, _ = causal_conv1d(x, weight, bias, whole([12]), initial_states=initial)
    state, ys = initial, []
    for part in x.split(cuts):
        y, state, _ = causal_conv1d(part, weight, bias, whole([len(part)]), initial_states=state)
        ys.append(y)
    assert_close("y", torch.cat(ys), whole_y, atol=1e-6)
    assert torch.equal(state, whole_state)


def test_step_continues() -> None:
    """Decode after prefill of several requests, one of which is shorter than the window."""
    lengths = (9, 1, 4)
    x, weight, bias, initial = random_inputs(lengths)
    more = torch.randn(6, 3, CHANNELS, generator=torch.Generator().manual_seed(1))
    _, state, _ = causal_conv1d(x, weight, bias, whole(lengths), initial_states=initial)
    want = convolution(x, weight, bias, lengths, initial)[1]
    for tokens in more:
        before = state.clone()
        y, new_state = causal_conv1d_step(tokens, weight, bias, state)
        want_y, want = convolution(tokens, weight, bias, [1] * 3, want)
        assert_close("y", y, want_y, atol=1e-5)
        assert_states_close("state", new_state, want)
        assert torch.equal(state, before), "the caller's state was modified"
        state = new_state


def test_comparisons_can_fail() -> None:
    """HY-11: negative controls: a zeroed state, two swapped ones, a state shifted by one column."""
    lengths = (1, 7)
    x, weight, bias, initial = random_inputs(lengths)
    want_y, want_final = convolution(x, weight, bias, lengths, initial)
    zeroed = initial.clone()
    zeroed[0] = 0
    for wrong in (zeroed, initial.flip(0), initial.roll(1, dims=2)):
        y, final, _ = causal_conv1d(x, weight, bias, whole(lengths), initial_states=wrong)
        with pytest.raises(AssertionError, match="y:"):
            assert_close("y", y, want_y)
        with pytest.raises(AssertionError, match="final states:"):
            assert_states_close("final states", final, want_final)


@pytest.mark.parametrize("lengths", [(8,), (1, 5), (2,)], ids=str)
@pytest.mark.parametrize("padding", [1, 3, 64])
def test_padding_is_not_read(lengths: tuple[int, ...], padding: int) -> None:
    """HY-10, FX-4: bitwise, whatever the padding holds; padding comes out as zeros."""
    x, weight, bias, initial = random_inputs(lengths)
    packed = whole(lengths)
    plain_y, plain_final, _ = causal_conv1d(x, weight, bias, packed, initial_states=initial)
    for content in (0.0, 1e30, float("nan")):
        padded = torch.cat([x, x.new_full((padding, CHANNELS), content)])
        y, final, _ = causal_conv1d(padded, weight, bias, packed, initial_states=initial)
        assert torch.equal(y[: sum(lengths)], plain_y)
        assert torch.equal(y[sum(lengths) :], torch.zeros(padding, CHANNELS))
        assert torch.equal(final, plain_final)


def test_sequences_do_not_see_each_other() -> None:
    """HY-11: NaN in the tokens and the state of one sequence stays there."""
    lengths = (5, 2, 6)
    x, weight, bias, initial = random_inputs(lengths)
    packed = whole(lengths)
    plain_y, plain_final, _ = causal_conv1d(x, weight, bias, packed, initial_states=initial)
    x[5:7] = float("nan")
    initial[1] = float("nan")
    y, final, _ = causal_conv1d(x, weight, bias, packed, initial_states=initial)
    assert torch.equal(y[:5], plain_y[:5])
    assert torch.equal(y[7:], plain_y[7:])
    assert torch.equal(final[[0, 2]], plain_final[[0, 2]])
    assert y[5:7].isnan().all()


@pytest.mark.parametrize("lengths", [(1,), (9,), (2, 9)], ids=str)
def test_final_states_are_copies(lengths: tuple[int, ...]) -> None:
    """HY-8: overwriting the state buffer or the tokens later changes neither outputs nor final states."""
    x, weight, bias, initial = random_inputs(lengths)
    y, final, _ = causal_conv1d(x, weight, bias, whole(lengths), initial_states=initial)
    kept_y, kept_final = y.clone(), final.clone()
    x.fill_(float("nan"))
    initial.fill_(float("nan"))
    assert torch.equal(y, kept_y)
    assert torch.equal(final, kept_final)


@pytest.mark.parametrize("lengths", [(6,), (1, 5, 2)], ids=str)
def test_gradients(lengths: tuple[int, ...]) -> None:
    leaves = tuple(tensor.requires_grad_() for tensor in random_inputs(lengths, dtype=torch.float64))
    packed = whole(lengths)
    got_y, got_final, _ = causal_conv1d(*leaves[:3], packed, initial_states=leaves[3])
    want_y, want_final = convolution(*leaves[:3], lengths, leaves[3])
    got = torch.autograd.grad(got_y.square().sum() + got_final.pow(3).sum(), leaves)
    want = torch.autograd.grad(want_y.square().sum() + want_final.pow(3).sum(), leaves)
    for name, got_grad, want_grad in zip(("x", "weight", "bias", "initial_states"), got, want, strict=True):
        assert_close(f"gradient of {name}", got_grad, want_grad, atol=1e-10, rtol=1e-10)


def test_nothing_is_read_back() -> None:
    """Tensors without data: an operator that asked one for a value, or left one on the host, would fail."""
    lengths = (9, 2)
    x, weight, bias, initial = (tensor.to("meta") for tensor in random_inputs(lengths))
    y, final, _ = causal_conv1d(x, weight, bias, whole(lengths, "meta"), initial_states=initial)
    assert (y.shape, final.shape) == (x.shape, initial.shape)
    y, state = causal_conv1d_step(x[:2], weight, bias, initial)
    assert (y.shape, state.shape) == (x[:2].shape, initial.shape)


def test_bf16_accumulates_in_fp32() -> None:
    lengths = (9, 2)
    x, weight, bias, initial = (tensor.bfloat16() for tensor in random_inputs(lengths))
    y, final, _ = causal_conv1d(x, weight, bias, whole(lengths), initial_states=initial)
    want_y, want_final = convolution(x, weight, bias, lengths, initial)
    assert y.dtype == torch.bfloat16
    assert_close("y", y, want_y, rtol=2**-8)
    assert torch.equal(final.double(), want_final)
    step_y, step_state = causal_conv1d_step(x[:1], weight, bias, initial[:1].float())
    assert_close("y of a step", step_y, want_y[:1], rtol=2**-8)
    assert step_state.dtype == torch.float32, "a state keeps its own dtype"


@pytest.mark.parametrize("window", [1, 2, 4, 5])
@pytest.mark.parametrize("lengths", [(12,), (1, 5, 2), (3, 9)], ids=str)
def test_states_after_any_token_are_final_states_of_the_sequence_that_ends_there(
    lengths: tuple[int, ...], window: int
) -> None:
    """HY-4, HY-8: this holds one or two tokens into a sequence too, where older columns are its initial state."""
    x, weight, bias, initial = random_inputs(lengths, window)
    first = [sum(lengths[:i]) for i in range(len(lengths))]
    places = [(i, count) for i, length in enumerate(lengths) for count in range(1, length + 1)]
    sequences = torch.tensor([i for i, _ in places])
    tokens = torch.tensor([first[i] + count for i, count in places])
    got = conv_states_after(x, tokens, torch.tensor(first)[sequences], initial[sequences])
    for (i, count), state in zip(places, got, strict=True):
        part = x[first[i] : first[i] + count]
        _, want, _ = causal_conv1d(part, weight, bias, whole([count]), initial_states=initial[i : i + 1])
        assert torch.equal(state, want[0]), (i, count)
