"""M1-1: the selective scan and its step against Mamba-1's recurrence, token by token in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from megatron_ext.mixers.chunk_metadata import cut_chunks
from megatron_ext.ops import chunk_padding
from megatron_ext.ops.recurrence import ScanOutput
from megatron_ext.ops.selective_scan.reference import selective_scan, selective_scan_step
from tests.unit_tests.ops.oracles import LENGTHS, assert_close, assert_states_close, selective_recurrence

CHANNELS, STATE = 6, 5
PER_TOKEN = ("u", "delta", "B", "C")


@dataclass
class Inputs:
    """Arguments of a scan over packed sequences of the given lengths."""

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    initial_states: Tensor

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def tokens(self, start: int, end: int) -> Inputs:
        """Inputs of tokens [start, end) only."""
        return replace(self, **{name: getattr(self, name)[start:end] for name in PER_TOKEN})

    def scan(self, starts: Sequence[int], lengths: Sequence[int], chunk_size: int) -> ScanOutput:
        u, delta, A, B, C, D, initial_states = self.tensors()
        chunks = cut_chunks(starts, lengths, chunk_size, "cpu")
        return selective_scan(u, delta, A, B, C, chunks, D=D, initial_states=initial_states)

    def recur(self, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        u, delta, A, B, C, D, initial_states = self.tensors()
        return selective_recurrence(u, delta, A, B, C, D, lengths, initial_states)


def random_inputs(
    lengths: Sequence[int], *, decay: str = "slow", seed: int = 0, dtype: torch.dtype = torch.float32
) -> Inputs:
    """Slow decay (A about -0.01, delta about 0.01) keeps a state for thousands of tokens; fast forgets at once."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype) + 0.5

    A_scale, delta_scale = {"slow": (0.01, 0.01), "medium": (1.0, 0.05), "fast": (16.0, 1.0)}[decay]
    return Inputs(
        u=normal(total, CHANNELS),
        delta=uniform(total, CHANNELS) * delta_scale,
        A=-uniform(CHANNELS, STATE) * A_scale,
        B=normal(total, STATE),
        C=normal(total, STATE),
        D=normal(CHANNELS),
        initial_states=normal(len(lengths), CHANNELS, STATE),
    )


def last_tokens(lengths: Sequence[int]) -> Tensor:
    return torch.tensor(lengths).cumsum(0) - 1


@pytest.mark.parametrize("decay", ["slow", "medium", "fast"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_scan_equals_recurrence(lengths: tuple[int, ...], decay: str) -> None:
    """M1-1, M1-2, HY-7, HY-9: outputs, final and chunk states, with initial states, any chunk size and grid offset."""
    inputs = random_inputs(lengths, decay=decay)
    y, states = inputs.recur(lengths)
    for chunk_size, shift in ((16, 5), (64, 0), (64, 63), (100, 7), (2048, 1866)):
        starts = [shift * (i + 1) for i in range(len(lengths))]
        got = inputs.scan(starts, lengths, chunk_size)
        ends = cut_chunks(starts, lengths, chunk_size, "cpu").cu_chunk_seqlens[1:] - 1
        assert_close(f"y, chunks of {chunk_size}", got.y, y)
        assert_states_close(f"chunk states, chunks of {chunk_size}", got.chunk_states, states[ends])
        assert_states_close(f"final states, chunks of {chunk_size}", got.final_states, states[last_tokens(lengths)])
        assert got.final_states.dtype == got.chunk_states.dtype == torch.float32


@pytest.mark.parametrize("lengths", [(65,), (64, 64), (3, 65, 1)], ids=str)
def test_without_initial_states_and_direct_path(lengths: tuple[int, ...]) -> None:
    inputs = random_inputs(lengths)
    want_y, states = selective_recurrence(inputs.u, inputs.delta, inputs.A, inputs.B, inputs.C, None, lengths)
    chunks = cut_chunks([0] * len(lengths), lengths, 48, "cpu")
    got = selective_scan(inputs.u, inputs.delta, inputs.A, inputs.B, inputs.C, chunks)
    assert_close("y", got.y, want_y)
    assert_states_close("final states", got.final_states, states[last_tokens(lengths)])


@pytest.mark.parametrize("cut", [1, 2, 31, 32, 33, 64, 100, 149])
def test_continuation_equals_one_pass(cut: int) -> None:
    """M1-3, HY-9: prefill cut anywhere, the rest started from the first part's final state."""
    inputs = random_inputs([150])
    whole = inputs.scan([0], [150], 48)
    first = inputs.tokens(0, cut).scan([0], [cut], 48)
    rest = replace(inputs.tokens(cut, 150), initial_states=first.final_states).scan([cut], [150 - cut], 48)
    assert_close("y", torch.cat([first.y, rest.y]), whole.y)
    assert_states_close("final state", rest.final_states, whole.final_states)
    on_grid = [*first.chunk_states[: cut // 48], *rest.chunk_states[: 150 // 48 - cut // 48]]
    assert_states_close("states on the grid", torch.stack(on_grid), whole.chunk_states[: 150 // 48])


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
        y, new_state = selective_scan_step(now.u, now.delta, inputs.A, now.B, now.C, state, D=inputs.D)
        want_y, want = selective_recurrence(now.u, now.delta, inputs.A, now.B, now.C, inputs.D, [1] * 3, want)
        assert_close("y", y, want_y)
        assert_states_close("state", new_state, want)
        assert torch.equal(state, before), "the caller's state was modified"
        state = new_state


@pytest.mark.parametrize("size", [1, 7, 64])
def test_results_do_not_depend_on_the_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (130, 7, 64)
    inputs = random_inputs(lengths)
    first = inputs.scan([0, 3, 8], lengths, 48)
    monkeypatch.setattr(chunk_padding, "PIECE", size)
    other = inputs.scan([0, 3, 8], lengths, 48)
    assert_close("y", other.y, first.y)
    assert_states_close("chunk states", other.chunk_states, first.chunk_states)


class TestTheComparisonsCanFail:
    """Negative controls (HY-7, HY-9): with slow decay every wrong state is seen."""

    lengths = (65, 100)

    def fails(self, changed: Inputs) -> None:
        want_y, states = random_inputs(self.lengths).recur(self.lengths)
        got = changed.scan((0, 0), self.lengths, 48)
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

    def test_one_state_of_one_channel_zeroed(self) -> None:
        inputs = random_inputs(self.lengths)
        inputs.initial_states[0, 2, 3] = 0
        self.fails(inputs)

    def test_decays_of_two_channels_swapped(self) -> None:
        inputs = random_inputs(self.lengths)
        self.fails(replace(inputs, A=inputs.A.flip(0)))

    def test_state_of_another_boundary(self) -> None:
        inputs = random_inputs(self.lengths)
        got = inputs.scan([0, 0], self.lengths, 32)
        _, states = inputs.recur(self.lengths)
        with pytest.raises(AssertionError, match="shifted"):
            assert_states_close("shifted", got.chunk_states[:2], states[[63, 64]])


class TestIsolation:
    """HY-10, HY-9: a state depends on its own tokens only."""

    @pytest.mark.parametrize("lengths", [(64,), (65,), (3, 70, 1)], ids=str)
    @pytest.mark.parametrize("padding", [1, 64])
    def test_padding_is_not_read(self, lengths: tuple[int, ...], padding: int) -> None:
        """HY-10: bitwise, whatever the padding holds and however much there is; padding comes out as zeros."""
        inputs = random_inputs(lengths)
        plain = inputs.scan([0] * len(lengths), lengths, 48)
        for content in (0.0, 1e30, float("nan")):
            tensors = {name: getattr(inputs, name) for name in PER_TOKEN}
            rows = {n: torch.cat([t, t.new_full((padding, *t.shape[1:]), content)]) for n, t in tensors.items()}
            got = replace(inputs, **rows).scan([0] * len(lengths), lengths, 48)
            assert torch.equal(got.y[: sum(lengths)], plain.y)
            assert torch.equal(got.y[sum(lengths) :], torch.zeros(padding, CHANNELS))
            assert torch.equal(got.final_states, plain.final_states)
            assert torch.equal(got.chunk_states, plain.chunk_states)

    def test_sequences_do_not_see_each_other(self) -> None:
        """HY-7: NaN in the tokens and the state of one sequence stays there."""
        lengths = (40, 30, 65)
        inputs = random_inputs(lengths)
        plain = inputs.scan([0, 5, 9], lengths, 48)
        for name in PER_TOKEN:
            getattr(inputs, name)[40:70] = float("nan")
        inputs.initial_states[1] = float("nan")
        got = inputs.scan([0, 5, 9], lengths, 48)
        for rows in (slice(0, 40), slice(70, 135)):
            assert torch.equal(got.y[rows], plain.y[rows])
        assert torch.equal(got.final_states[[0, 2]], plain.final_states[[0, 2]])
        assert got.y[40:70].isnan().all()

    def test_later_tokens_do_not_reach_earlier_ones(self) -> None:
        inputs = random_inputs([100])
        plain = inputs.scan([0], [100], 48)
        inputs.u[50:] = 1e6
        inputs.B[50:] = -1e6
        assert torch.equal(inputs.scan([0], [100], 48).y[:50], plain.y[:50])

    def test_inputs_are_not_modified(self) -> None:
        inputs = random_inputs((40, 3))
        copies = [tensor.clone() for tensor in inputs.tensors()]
        inputs.scan([0, 3], (40, 3), 16)
        for copy, tensor in zip(copies, inputs.tensors(), strict=True):
            assert torch.equal(copy, tensor)


class TestGradients:
    """The scan is what training differentiates."""

    @pytest.mark.parametrize(("lengths", "chunk_size"), [((40,), 64), ((5, 1, 37), 3), ((64, 64), 64)], ids=str)
    @pytest.mark.parametrize("decay", ["slow", "fast"])
    def test_equal_those_through_the_recurrence(self, lengths: tuple[int, ...], chunk_size: int, decay: str) -> None:
        inputs = random_inputs(lengths, decay=decay, dtype=torch.float64)
        leaves = [tensor.requires_grad_() for tensor in inputs.tensors()]
        generator = torch.Generator().manual_seed(7)
        wanted_y = torch.randn(inputs.u.shape, generator=generator, dtype=torch.float64)
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
    rounded = replace(inputs, **{name: getattr(inputs, name).bfloat16() for name in ("u", "B", "C")})
    y, states = rounded.recur(lengths)
    got = rounded.scan([0, 0], lengths, 48)
    assert got.y.dtype == torch.bfloat16
    assert_states_close("final states", got.final_states, states[last_tokens(lengths)])
    assert_close("y", got.y, y, rtol=2**-8)
    one = rounded.tokens(0, 1)
    step_y, step_state = selective_scan_step(
        one.u, one.delta, one.A, one.B, one.C, inputs.initial_states[:1], D=inputs.D
    )
    assert step_y.dtype == torch.bfloat16
    assert_states_close("state after a step", step_state, states[:1])


def test_nothing_is_read_back() -> None:
    """Tensors without data: an operator that asked one for a value, or left one on the host, would fail."""
    lengths = (33, 40, 1)
    inputs = Inputs(*(tensor.to("meta") for tensor in random_inputs(lengths).tensors()))
    chunks = cut_chunks([0, 3, 7], lengths, 16, "meta")
    u, delta, A, B, C, D, initial_states = inputs.tensors()
    got = selective_scan(u, delta, A, B, C, chunks, D=D, initial_states=initial_states)
    assert [tuple(t.shape) for t in got] == [(74, CHANNELS), initial_states.shape, (7, CHANNELS, STATE)]
    one = inputs.tokens(0, 3)
    y, state = selective_scan_step(one.u, one.delta, A, one.B, one.C, initial_states, D=D)
    assert (y.shape, state.shape) == (one.u.shape, initial_states.shape)


def test_views_are_taken_as_they_are() -> None:
    """Mixers pass slices of one projection, not contiguous tensors."""
    lengths = (33, 40)
    inputs = random_inputs(lengths)
    u, B, C, delta = torch.cat([inputs.u, inputs.B, inputs.C, inputs.delta], dim=1).split(
        [CHANNELS, STATE, STATE, CHANNELS], dim=1
    )
    got, want = replace(inputs, u=u, delta=delta, B=B, C=C).scan([0, 3], lengths, 16), inputs.scan([0, 3], lengths, 16)
    assert_close("y", got.y, want.y, atol=1e-6)
    assert_close("final states", got.final_states, want.final_states, atol=1e-6)
