"""The chunked gated delta rule and its step against the rule itself, token by token in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.mixers.chunk_metadata import cut_chunks
from megatron_ext.ops.gated_delta_rule.reference import gated_delta_scan, gated_delta_step
from megatron_ext.ops.recurrence import ScanOutput
from tests.unit_tests.ops.oracles import LENGTHS, assert_close, assert_states_close, delta_recurrence

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6, 5
PER_TOKEN = ("q", "k", "v", "g", "beta")


@dataclass
class Inputs:
    """Arguments of a scan over packed sequences of the given lengths."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_states: Tensor

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def tokens(self, start: int, end: int) -> Inputs:
        """Inputs of tokens [start, end) only."""
        return replace(self, **{name: getattr(self, name)[start:end] for name in PER_TOKEN})

    def scan(self, starts: Sequence[int], lengths: Sequence[int], chunk_size: int, **options: bool) -> ScanOutput:
        chunks = cut_chunks(starts, lengths, chunk_size, "cpu")
        q, k, v, g, beta, initial_states = self.tensors()
        return gated_delta_scan(q, k, v, g, beta, chunks, initial_states=initial_states, **options)

    def recur(self, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta, initial_states = self.tensors()
        return delta_recurrence(q, k, v, g, beta, lengths, initial_states)


def random_inputs(
    lengths: Sequence[int], *, decay: str = "slow", seed: int = 0, dtype: torch.dtype = torch.float32
) -> Inputs:
    """Slow decay keeps a state for thousands of tokens; a weak beta, since the delta rule forgets where it writes."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype)

    decay_scale, beta_scale = {"slow": (1e-4, 0.01), "medium": (0.05, 0.5), "fast": (16.0, 1.0)}[decay]
    return Inputs(
        q=F.normalize(normal(total, KEY_HEADS, KEY_DIM), dim=-1),
        k=F.normalize(normal(total, KEY_HEADS, KEY_DIM), dim=-1),
        v=normal(total, VALUE_HEADS, VALUE_DIM),
        g=-uniform(total, VALUE_HEADS) * decay_scale,
        beta=uniform(total, VALUE_HEADS) * beta_scale,
        initial_states=normal(len(lengths), VALUE_HEADS, KEY_DIM, VALUE_DIM),
    )


def last_tokens(lengths: Sequence[int]) -> Tensor:
    return torch.tensor(lengths).cumsum(0) - 1


@pytest.mark.parametrize("decay", ["slow", "medium", "fast"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_scan_equals_recurrence(lengths: tuple[int, ...], decay: str) -> None:
    """LA-2, HY-7, HY-9, HY-12: outputs, final and chunk states, at any chunk size and grid offset."""
    inputs = random_inputs(lengths, decay=decay)
    y, states = inputs.recur(lengths)
    for chunk_size, shift in ((1, 0), (16, 5), (64, 0), (64, 63), (100, 30)):
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
def test_without_initial_states(lengths: tuple[int, ...]) -> None:
    inputs = random_inputs(lengths, decay="medium")
    y, states = replace(inputs, initial_states=None).recur(lengths)
    got = replace(inputs, initial_states=None).scan([0] * len(lengths), lengths, 32)
    assert_close("y", got.y, y)
    assert_states_close("final states", got.final_states, states[last_tokens(lengths)])


def test_equal_keys_overwrite_each_other() -> None:
    """The state recalls only the last value of one key for 150 tokens (beta 1, no decay); errors do not add up."""
    inputs = random_inputs([150])
    inputs.k[:] = inputs.k[0]
    inputs.g.zero_()
    inputs.beta.fill_(1.0)
    got = inputs.scan([0], [150], 64).final_states[0]
    recalled = (got * inputs.k[0].repeat_interleave(2, dim=0)[..., None]).sum(1)
    assert_states_close("what the key recalls", recalled, inputs.v[-1])


def test_normalized_inside() -> None:
    """Queries and keys of any length, in the scan and in the step; the formula is that of trained models."""
    inputs = random_inputs([70], decay="medium")
    long = replace(inputs, q=inputs.q * 3, k=inputs.k * 0.1)
    unit = replace(long, **{n: t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for n, t in vars(long).items()
                            if n in "qk"})  # fmt: skip
    y, states = unit.recur([70])
    got = long.scan([0], [70], 32, normalize=True)
    assert_close("y", got.y, y)
    assert_states_close("final state", got.final_states, states[-1:])
    one = long.tokens(0, 1)
    step_y, state = gated_delta_step(*one.tensors(), normalize=True)
    assert_close("y of a step", step_y, y[:1])
    assert_states_close("state after a step", state, states[:1])


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
    """Decode after prefill: several requests, one token each, several times; the caller's state stays as it was."""
    lengths = (20, 33, 1)
    inputs = random_inputs(lengths)
    _, states = inputs.recur(lengths)
    more = random_inputs([3] * 5, decay="medium", seed=1)  # 5 steps of 3 requests
    state = inputs.scan([0] * 3, lengths, 16).final_states
    want = states[last_tokens(lengths)]
    for step in range(5):
        now = more.tokens(3 * step, 3 * step + 3)
        before = state.clone()
        y, new_state = gated_delta_step(now.q, now.k, now.v, now.g, now.beta, state)
        want_y, want = replace(now, initial_states=want).recur([1] * 3)
        assert_close("y", y, want_y)
        assert_states_close("state", new_state, want)
        assert torch.equal(state, before), "the caller's state was modified"
        state = new_state


class TestTheComparisonsCanFail:
    """Negative controls (HY-7, HY-9): with slow decay every wrong state is seen."""

    lengths = (65, 500)

    def fails(self, changed: Inputs) -> None:
        want_y, states = random_inputs(self.lengths).recur(self.lengths)
        got = changed.scan((0, 0), self.lengths, 64)
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

    def test_value_heads_read_another_key_head(self) -> None:
        inputs = random_inputs(self.lengths)
        self.fails(replace(inputs, k=inputs.k.flip(1)))

    def test_state_of_another_boundary(self) -> None:
        inputs = random_inputs(self.lengths)
        got = inputs.scan([0, 0], self.lengths, 32)
        _, states = inputs.recur(self.lengths)
        with pytest.raises(AssertionError, match="shifted"):
            assert_states_close("shifted", got.chunk_states[:2], states[[63, 64]])


class TestIsolation:
    """HY-10, HY-9: a state depends on its own tokens only."""

    @pytest.mark.parametrize("lengths", [(64,), (65,), (32, 32), (3, 70, 1)], ids=str)
    def test_padding_is_not_read(self, lengths: tuple[int, ...]) -> None:
        """HY-10: bitwise, whatever the padding holds and however much there is; padding comes out as zeros."""
        inputs = random_inputs(lengths)
        plain = inputs.scan([0] * len(lengths), lengths, 32, normalize=True)
        for padding, content in ((1, 0.0), (7, 1e30), (64, float("nan"))):
            rows = {n: torch.cat([t, t.new_full((padding, *t.shape[1:]), content)]) for n, t in vars(inputs).items()}
            padded = Inputs(**(rows | {"initial_states": inputs.initial_states}))
            got = padded.scan([0] * len(lengths), lengths, 32, normalize=True)
            assert torch.equal(got.y[: sum(lengths)], plain.y)
            assert torch.equal(got.y[sum(lengths) :], torch.zeros(padding, VALUE_HEADS, VALUE_DIM))
            assert torch.equal(got.final_states, plain.final_states)
            assert torch.equal(got.chunk_states, plain.chunk_states)

    def test_sequences_do_not_see_each_other(self) -> None:
        """HY-7: NaN in the tokens and the state of one sequence stays there."""
        lengths = (40, 30, 65)
        inputs = random_inputs(lengths)
        plain = inputs.scan([0, 5, 9], lengths, 32)
        for name in PER_TOKEN:
            getattr(inputs, name)[40:70] = float("nan")
        inputs.initial_states[1] = float("nan")
        got = inputs.scan([0, 5, 9], lengths, 32)
        for rows in (slice(0, 40), slice(70, 135)):
            assert torch.equal(got.y[rows], plain.y[rows])
        assert torch.equal(got.final_states[[0, 2]], plain.final_states[[0, 2]])
        assert got.y[40:70].isnan().all()

    def test_inputs_are_not_modified(self) -> None:
        inputs = random_inputs((40, 3))
        copies = [tensor.clone() for tensor in inputs.tensors()]
        inputs.scan([0, 3], (40, 3), 16)
        for copy, tensor in zip(copies, inputs.tensors(), strict=True):
            assert torch.equal(copy, tensor)


class TestGradients:
    """The scan is what training differentiates."""

    @pytest.mark.parametrize(("lengths", "chunk_size"), [((9,), 4), ((8,), 4), ((5, 1, 7), 3), ((4, 4), 4)], ids=str)
    @pytest.mark.parametrize("decay", ["slow", "medium", "fast"])
    def test_equal_those_through_the_recurrence(self, lengths: tuple[int, ...], chunk_size: int, decay: str) -> None:
        inputs = random_inputs(lengths, decay=decay, dtype=torch.float64)
        leaves = [tensor.requires_grad_() for tensor in inputs.tensors()]
        generator = torch.Generator().manual_seed(7)
        wanted_y = torch.randn(inputs.v.shape, generator=generator, dtype=torch.float64)
        wanted_state = torch.randn(inputs.initial_states.shape, generator=generator, dtype=torch.float64)

        got = inputs.scan([0] * len(lengths), lengths, chunk_size)
        loss = (got.y * wanted_y).sum() + (got.final_states * wanted_state).sum()
        got_grads = torch.autograd.grad(loss, leaves)
        y, states = inputs.recur(lengths)
        loss = (y * wanted_y).sum() + (states[last_tokens(lengths)] * wanted_state).sum()
        want_grads = torch.autograd.grad(loss, leaves)
        for field, got_grad, want_grad in zip(fields(inputs), got_grads, want_grads, strict=True):
            assert_close(f"gradient of {field.name}", got_grad, want_grad, atol=1e-9, rtol=1e-9)

    @pytest.mark.parametrize("decay", [-1e-4, -1.0, -1e5])
    def test_are_finite_at_any_decay(self, decay: float) -> None:
        inputs = random_inputs([70], decay="fast")
        inputs.g.fill_(decay)
        leaves = [tensor.requires_grad_() for tensor in inputs.tensors()]
        got = inputs.scan([0], [70], 64, normalize=True)
        grads = torch.autograd.grad(got.y.square().sum() + got.chunk_states.sum(), leaves)
        assert got.y.isfinite().all()
        assert all(grad.isfinite().all() for grad in grads)


def test_bf16_accumulates_in_fp32() -> None:
    """Inputs in bf16: the states are those of the rounded inputs, in fp32; y is rounded once."""
    lengths = (65, 40)
    inputs = random_inputs(lengths)
    rounded = replace(inputs, **{name: getattr(inputs, name).bfloat16() for name in ("q", "k", "v")})
    y, states = rounded.recur(lengths)
    got = rounded.scan([0, 0], lengths, 32)
    assert got.y.dtype == torch.bfloat16
    assert_states_close("final states", got.final_states, states[last_tokens(lengths)])
    assert_close("y", got.y, y, rtol=2**-8)
    one = replace(rounded.tokens(0, 1), initial_states=inputs.initial_states[:1])
    step_y, step_state = gated_delta_step(*one.tensors())
    assert step_y.dtype == torch.bfloat16
    assert_states_close("state after a step", step_state, states[:1])


def test_nothing_is_read_back() -> None:
    """Tensors without data: an operator that asked one for a value, or left one on the host, would fail."""
    lengths = (33, 40, 1)
    *tokens, initial_states = (tensor.to("meta") for tensor in random_inputs(lengths).tensors())
    chunks = cut_chunks([0, 3, 7], lengths, 16, "meta")
    got = gated_delta_scan(*tokens, chunks, initial_states=initial_states, normalize=True)
    state_shape = initial_states.shape[1:]
    assert [tuple(t.shape) for t in got] == [(74, VALUE_HEADS, VALUE_DIM), (3, *state_shape), (7, *state_shape)]
    y, state = gated_delta_step(*(t[:3] for t in tokens), initial_states, normalize=True)
    assert (y.shape, state.shape) == ((3, VALUE_HEADS, VALUE_DIM), initial_states.shape)
