"""The SSD scan and step against Mamba-2's recurrence, token by token in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from megatron_ext.mixers.chunk_metadata import cut_chunks
from megatron_ext.ops.recurrence import ScanOutput
from megatron_ext.ops.ssd.reference import ssd_scan, ssd_step
from tests.unit_tests.ops.oracles import LENGTHS, assert_close, assert_states_close, recurrence

HEADS, HEAD_DIM, GROUPS, STATE = 4, 3, 2, 5


@dataclass
class Inputs:
    """Arguments of a scan over packed sequences of the given lengths."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    initial_states: Tensor

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def tokens(self, start: int, end: int) -> Inputs:
        """Inputs of tokens [start, end) only."""
        return replace(self, **{name: getattr(self, name)[start:end] for name in ("x", "dt", "B", "C")})

    def scan(self, starts: Sequence[int], lengths: Sequence[int], chunk_size: int) -> ScanOutput:
        chunks = cut_chunks(starts, lengths, chunk_size, "cpu")
        x, dt, A, B, C, D, initial_states = self.tensors()
        return ssd_scan(x, dt, A, B, C, chunks, D=D, initial_states=initial_states)

    def recur(self, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        x, dt, A, B, C, D, initial_states = self.tensors()
        return recurrence(x, dt, A, B, C, D, lengths, initial_states)


def random_inputs(
    lengths: Sequence[int], *, decay: str = "slow", seed: int = 0, dtype: torch.dtype = torch.float32
) -> Inputs:
    """Slow decay (A about -0.01, dt about 0.01) keeps a state for thousands of tokens; fast decay forgets at once."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype) + 0.5

    A_scale, dt_scale = {"slow": (0.01, 0.01), "medium": (1.0, 0.05), "fast": (16.0, 1.0)}[decay]
    return Inputs(
        x=normal(total, HEADS, HEAD_DIM),
        dt=uniform(total, HEADS) * dt_scale,
        A=-uniform(HEADS) * A_scale,
        B=normal(total, GROUPS, STATE),
        C=normal(total, GROUPS, STATE),
        D=normal(HEADS),
        initial_states=normal(len(lengths), HEADS, HEAD_DIM, STATE),
    )


def last_tokens(lengths: Sequence[int]) -> Tensor:
    return torch.tensor(lengths).cumsum(0) - 1


@pytest.mark.parametrize("decay", ["slow", "medium", "fast"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_scan_equals_recurrence(lengths: tuple[int, ...], decay: str) -> None:
    """HY-7, HY-9, HY-12: outputs, final and chunk states, with initial states, at any chunk size and grid offset."""
    inputs = random_inputs(lengths, decay=decay)
    y, states = inputs.recur(lengths)
    for chunk_size, shift in ((1, 0), (16, 5), (64, 0), (64, 63), (128, 100), (1000, 0)):
        starts = [shift * (i + 1) for i in range(len(lengths))]
        if chunk_size == 1 and sum(lengths) > 100:
            continue
        got = inputs.scan(starts, lengths, chunk_size)
        ends = cut_chunks(starts, lengths, chunk_size, "cpu").cu_chunk_seqlens[1:] - 1
        assert_close(f"y, chunks of {chunk_size}", got.y, y)
        assert_states_close(f"chunk states, chunks of {chunk_size}", got.chunk_states, states[ends])
        assert_states_close(f"final states, chunks of {chunk_size}", got.final_states, states[last_tokens(lengths)])
        assert got.final_states.dtype == got.chunk_states.dtype == torch.float32


@pytest.mark.parametrize("lengths", [(65,), (64, 64), (3, 65, 1)], ids=str)
def test_without_initial_states_and_direct_path(lengths: tuple[int, ...]) -> None:
    inputs = random_inputs(lengths)
    want_y, states = recurrence(inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C, None, lengths)
    chunks = cut_chunks([0] * len(lengths), lengths, 32, "cpu")
    got = ssd_scan(inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C, chunks)
    assert_close("y", got.y, want_y)
    assert_states_close("final states", got.final_states, states[last_tokens(lengths)])


@pytest.mark.parametrize("cut", [1, 2, 31, 32, 33, 64, 100, 149])
def test_continuation_equals_one_pass(cut: int) -> None:
    """HY-7, HY-9: prefill cut anywhere, the rest started from the first part's final state."""
    inputs = random_inputs([150])
    whole = inputs.scan([0], [150], 32)
    first = inputs.tokens(0, cut).scan([0], [cut], 32)
    rest = replace(inputs.tokens(cut, 150), initial_states=first.final_states).scan([cut], [150 - cut], 32)
    assert_close("y", torch.cat([first.y, rest.y]), whole.y)
    assert_states_close("final state", rest.final_states, whole.final_states)
    boundaries = 150 // 32 - cut // 32
    if boundaries:
        assert_states_close(
            "states on the grid", rest.chunk_states[:boundaries], whole.chunk_states[cut // 32 : 150 // 32]
        )


def test_step_continues_a_scan() -> None:
    """Decode after prefill: several requests, one token each, several times."""
    lengths = (20, 33, 1)
    inputs = random_inputs(lengths)
    _, states = inputs.recur(lengths)
    more = random_inputs([3] * 5, seed=1)  # 5 steps of 3 requests
    state = inputs.scan([0] * 3, lengths, 16).final_states
    want = states[last_tokens(lengths)]
    for step in range(5):
        now = more.tokens(3 * step, 3 * step + 3)
        before = state.clone()
        y, new_state = ssd_step(now.x, now.dt, inputs.A, now.B, now.C, state, D=inputs.D)
        want_y, want = recurrence(now.x, now.dt, inputs.A, now.B, now.C, inputs.D, [1] * 3, want)
        assert_close("y", y, want_y)
        assert_states_close("state", new_state, want)
        assert torch.equal(state, before), "the caller's state was modified"
        state = new_state


@pytest.mark.parametrize("decay", ["slow", "fast"])
def test_results_do_not_depend_on_the_chunk(decay: str) -> None:
    """HY-12: all outputs of all chunk sizes against each other."""
    lengths = (130, 7, 64)
    inputs = random_inputs(lengths, decay=decay)
    first = inputs.scan([0] * 3, lengths, 16)
    for chunk_size in (8, 13, 48, 64, 128, 256):
        other = inputs.scan([0] * 3, lengths, chunk_size)
        assert_close("y", other.y, first.y)
        assert_states_close("final states", other.final_states, first.final_states)


def test_long_fast_decay_keeps_what_came_last() -> None:
    """Sums of logarithms in the thousands: the small differences at their end still count."""
    inputs = random_inputs([512], decay="fast")
    inputs.dt[:, ::2] = 1e-4
    inputs.dt[::9] = 3.0
    y, states = inputs.recur([512])
    got = inputs.scan([0], [512], 256)
    assert_close("y", got.y, y, atol=1e-5, rtol=2e-5)
    assert_states_close("final state", got.final_states, states[-1:])


class TestTheComparisonsCanFail:
    """Negative controls (HY-7, HY-9): with slow decay every wrong state is seen."""

    lengths = (65, 100)

    def fails(self, changed: Inputs, starts: Sequence[int] = (0, 0)) -> None:
        want_y, states = random_inputs(self.lengths).recur(self.lengths)
        got = changed.scan(starts, self.lengths, 32)
        with pytest.raises(AssertionError, match="y:"):
            assert_close("y", got.y, want_y)
        with pytest.raises(AssertionError, match="final states:"):
            assert_states_close("final states", got.final_states, states[last_tokens(self.lengths)])

    def test_zeroed_state(self) -> None:
        inputs = random_inputs(self.lengths)
        inputs.initial_states[1] = 0
        self.fails(inputs)

    def test_swapped_states(self) -> None:
        inputs = random_inputs(self.lengths)
        self.fails(replace(inputs, initial_states=inputs.initial_states.flip(0)))

    def test_one_head_zeroed(self) -> None:
        inputs = random_inputs(self.lengths)
        inputs.initial_states[0, 2] = 0
        self.fails(inputs)

    def test_state_of_another_boundary(self) -> None:
        inputs = random_inputs(self.lengths)
        got = inputs.scan([0, 0], self.lengths, 32)
        _, states = inputs.recur(self.lengths)
        with pytest.raises(AssertionError, match="shifted"):
            assert_states_close("shifted", got.chunk_states[:2], states[[63, 64]])


class TestIsolation:
    """HY-10, HY-9: a state depends on its own tokens only."""

    @pytest.mark.parametrize("lengths", [(64,), (65,), (32, 32), (3, 70, 1)], ids=str)
    @pytest.mark.parametrize("padding", [1, 7, 64])
    def test_padding_is_not_read(self, lengths: tuple[int, ...], padding: int) -> None:
        """HY-10: bitwise, whatever the padding holds and however much there is; padding comes out as zeros."""
        inputs = random_inputs(lengths)
        plain = inputs.scan([0] * len(lengths), lengths, 32)
        for content in (0.0, 1e30, float("nan")):
            padded = replace(
                inputs,
                **{
                    name: torch.cat([t, t.new_full((padding, *t.shape[1:]), content)])
                    for name, t in (("x", inputs.x), ("dt", inputs.dt), ("B", inputs.B), ("C", inputs.C))
                },
            )
            got = padded.scan([0] * len(lengths), lengths, 32)
            assert torch.equal(got.y[: sum(lengths)], plain.y)
            assert torch.equal(got.y[sum(lengths) :], torch.zeros(padding, HEADS, HEAD_DIM))
            assert torch.equal(got.final_states, plain.final_states)
            assert torch.equal(got.chunk_states, plain.chunk_states)

    def test_sequences_do_not_see_each_other(self) -> None:
        """HY-7: NaN in the tokens and the state of one sequence stays there."""
        lengths = (40, 30, 65)
        inputs = random_inputs(lengths)
        plain = inputs.scan([0, 5, 9], lengths, 32)
        for tensor in (inputs.x, inputs.dt, inputs.B, inputs.C):
            tensor[40:70] = float("nan")
        inputs.initial_states[1] = float("nan")
        got = inputs.scan([0, 5, 9], lengths, 32)
        for rows in (slice(0, 40), slice(70, 135)):
            assert torch.equal(got.y[rows], plain.y[rows])
        assert torch.equal(got.final_states[[0, 2]], plain.final_states[[0, 2]])
        assert got.y[40:70].isnan().all()

    def test_later_tokens_do_not_reach_earlier_ones(self) -> None:
        inputs = random_inputs([100])
        plain = inputs.scan([0], [100], 32)
        inputs.x[50:] = 1e6
        inputs.B[50:] = -1e6
        got = inputs.scan([0], [100], 32)
        assert torch.equal(got.y[:50], plain.y[:50])

    def test_inputs_are_not_modified(self) -> None:
        inputs = random_inputs((40, 3))
        copies = [tensor.clone() for tensor in inputs.tensors()]
        inputs.scan([0, 3], (40, 3), 16)
        for copy, tensor in zip(copies, inputs.tensors(), strict=True):
            assert torch.equal(copy, tensor)


class TestGradients:
    """The scan is what training differentiates."""

    @pytest.mark.parametrize(("lengths", "chunk_size"), [((9,), 4), ((8,), 4), ((5, 1, 7), 3), ((4, 4), 4)], ids=str)
    @pytest.mark.parametrize("decay", ["slow", "fast"])
    def test_equal_those_through_the_recurrence(self, lengths: tuple[int, ...], chunk_size: int, decay: str) -> None:
        inputs = random_inputs(lengths, decay=decay, dtype=torch.float64)
        leaves = [tensor.requires_grad_() for tensor in inputs.tensors()]
        generator = torch.Generator().manual_seed(7)
        wanted_y = torch.randn(inputs.x.shape, generator=generator, dtype=torch.float64)
        wanted_state = torch.randn(inputs.initial_states.shape, generator=generator, dtype=torch.float64)

        got = inputs.scan([0] * len(lengths), lengths, chunk_size)
        loss = (got.y * wanted_y).sum() + (got.final_states * wanted_state).sum()
        got_grads = torch.autograd.grad(loss, leaves)
        y, states = inputs.recur(lengths)
        loss = (y * wanted_y).sum() + (states[last_tokens(lengths)] * wanted_state).sum()
        want_grads = torch.autograd.grad(loss, leaves)
        for field, got_grad, want_grad in zip(fields(inputs), got_grads, want_grads, strict=True):
            assert_close(f"gradient of {field.name}", got_grad, want_grad, atol=1e-9, rtol=1e-9)

    def test_gradcheck(self) -> None:
        inputs = random_inputs((3, 2), decay="medium", dtype=torch.float64)
        leaves = tuple(tensor.requires_grad_() for tensor in inputs.tensors())
        assert torch.autograd.gradcheck(lambda *tensors: Inputs(*tensors).scan([0, 1], (3, 2), 2), leaves)

    @pytest.mark.parametrize("A", [-1e-4, -1.0, -100.0, -1e5])
    def test_are_finite_at_any_decay(self, A: float) -> None:
        inputs = random_inputs([70], decay="fast")
        inputs.A.fill_(A)
        leaves = [tensor.requires_grad_() for tensor in inputs.tensors()]
        got = inputs.scan([0], [70], 64)
        grads = torch.autograd.grad(got.y.square().sum() + got.chunk_states.sum(), leaves)
        assert got.y.isfinite().all()
        assert all(grad.isfinite().all() for grad in grads)


def test_bf16_accumulates_in_fp32() -> None:
    """Inputs in bf16: the states are those of the rounded inputs, in fp32; y is rounded once."""
    lengths = (65, 40)
    inputs = random_inputs(lengths)
    rounded = replace(inputs, **{name: getattr(inputs, name).bfloat16() for name in ("x", "B", "C")})
    y, states = rounded.recur(lengths)
    got = rounded.scan([0, 0], lengths, 32)
    assert got.y.dtype == torch.bfloat16
    assert_states_close("final states", got.final_states, states[last_tokens(lengths)])
    assert_close("y", got.y, y, rtol=2**-8)
    one = rounded.tokens(0, 1)
    step_y, step_state = ssd_step(one.x, one.dt, one.A, one.B, one.C, inputs.initial_states[:1], D=inputs.D)
    assert step_y.dtype == torch.bfloat16
    assert_states_close("state after a step", step_state, states[:1])


def test_nothing_is_read_back() -> None:
    """Tensors without data: an operator that asked one for a value, or left one on the host, would fail."""
    lengths = (33, 40, 1)
    inputs = Inputs(*(tensor.to("meta") for tensor in random_inputs(lengths).tensors()))
    chunks = cut_chunks([0, 3, 7], lengths, 16, "meta")
    x, dt, A, B, C, D, initial_states = inputs.tensors()
    got = ssd_scan(x, dt, A, B, C, chunks, D=D, initial_states=initial_states)
    assert [tuple(t.shape) for t in got] == [(74, HEADS, HEAD_DIM), initial_states.shape, (7, HEADS, HEAD_DIM, STATE)]
    one = inputs.tokens(0, 3)
    y, state = ssd_step(one.x, one.dt, A, one.B, one.C, initial_states, D=D)
    assert (y.shape, state.shape) == (one.x.shape, initial_states.shape)


def test_views_are_taken_as_they_are() -> None:
    """Mixers pass slices of one projection, not contiguous tensors."""
    lengths = (33, 40)
    inputs = random_inputs(lengths)
    x_width, group_width = HEADS * HEAD_DIM, GROUPS * STATE
    joined = torch.cat([inputs.x.flatten(1), inputs.B.flatten(1), inputs.C.flatten(1), inputs.dt], dim=1)
    x, B, C, dt = joined.split([x_width, group_width, group_width, HEADS], dim=1)
    strided = replace(
        inputs,
        x=x.unflatten(1, (HEADS, HEAD_DIM)),
        dt=dt,
        B=B.unflatten(1, (GROUPS, STATE)),
        C=C.unflatten(1, (GROUPS, STATE)),
        initial_states=inputs.initial_states.transpose(-1, -2).contiguous().transpose(-1, -2),
    )
    got, want = strided.scan([0, 3], lengths, 16), inputs.scan([0, 3], lengths, 16)
    assert_close("y", got.y, want.y, atol=1e-6)
    assert_close("final states", got.final_states, want.final_states, atol=1e-6)
    one, plain = strided.tokens(0, 2), inputs.tokens(0, 2)
    y, state = ssd_step(one.x, one.dt, one.A, one.B, one.C, one.initial_states, D=one.D)
    want_y, want_state = ssd_step(plain.x, plain.dt, plain.A, plain.B, plain.C, plain.initial_states, D=plain.D)
    assert_close("y of a step", y, want_y, atol=1e-6)
    assert_close("state of a step", state, want_state, atol=1e-6)
