"""M1-1, LA-2: the reference of each operator with states against its formula, token by token in fp64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.mcore import platform
from megatron_ext.ops.causal_conv1d.reference import causal_conv1d, causal_conv1d_step
from megatron_ext.ops.gated_delta_rule.reference import gated_delta_scan, gated_delta_step
from megatron_ext.ops.recurrence import ScanOutput
from megatron_ext.ops.selective_scan.reference import selective_scan, selective_scan_step
from megatron_ext.ops.ssd.reference import ssd_scan, ssd_step
from tests.on_request import long_except
from tests.unit_tests.ops.conftest import on_device
from tests.unit_tests.ops.oracles import (
    LENGTHS,
    assert_close,
    assert_states_close,
    convolution,
    delta_recurrence,
    recurrence,
    selective_recurrence,
)
from tests.unit_tests.support.chunk_grid import cut_chunks


@dataclass(frozen=True)
class Kind:
    """An operator: its scan and step, its formula, and the shapes of its arguments without their tokens."""

    scan: Callable[..., ScanOutput]
    step: Callable[..., tuple[Tensor, Tensor]]
    formula: Callable[..., tuple[Tensor, Tensor]]
    tokens: dict[str, tuple[int, ...]]
    weights: dict[str, tuple[int, ...]]
    state: tuple[int, ...]
    order: tuple[str, ...]


KINDS = {
    "ssd": Kind(
        ssd_scan,
        ssd_step,
        recurrence,
        {"x": (4, 3), "dt": (4,), "B": (2, 5), "C": (2, 5)},
        {"A": (4,), "D": (4,)},
        (4, 3, 5),
        ("x", "dt", "A", "B", "C"),
    ),
    "selective_scan": Kind(
        selective_scan,
        selective_scan_step,
        selective_recurrence,
        {"x": (6,), "dt": (6,), "B": (5,), "C": (5,)},
        {"A": (6, 5), "D": (6,)},
        (6, 5),
        ("x", "dt", "A", "B", "C"),
    ),
    "gated_delta_rule": Kind(
        gated_delta_scan,
        gated_delta_step,
        delta_recurrence,
        {"q": (2, 6), "k": (2, 6), "x": (4, 5), "g": (4,), "beta": (4,)},
        {},
        (4, 6, 5),
        ("q", "k", "x", "g", "beta"),
    ),
    "convolution": Kind(
        causal_conv1d,
        causal_conv1d_step,
        convolution,
        {"x": (6,)},
        {"weight": (6, 4), "bias": (6,)},
        (6, 3),
        ("x", "weight", "bias"),
    ),
}
# Scales of A, dt, g and beta. Slow decay keeps a state for thousands of tokens, fast decay forgets at once. The delta
# rule forgets where it writes, so a slow one has a weak beta.
DECAYS = {
    "slow": {"A": 0.01, "dt": 0.01, "g": 1e-4, "beta": 0.01},
    "medium": {"A": 1.0, "dt": 0.05, "g": 0.05, "beta": 0.5},
    "fast": {"A": 16.0, "dt": 1.0, "g": 16.0, "beta": 1.0},
}
CHUNK = 48  # more than the pieces that a selective scan is computed in


class Inputs:
    """Arguments of a scan over packed sequences, by name; `D` and `initial_states` may be missing."""

    def __init__(self, kind: str, named: dict[str, Tensor]) -> None:
        self.name, self.kind, self.named = kind, KINDS[kind], named

    def __getitem__(self, name: str) -> Tensor:
        return self.named[name]

    def replaced(self, **named: Tensor | None) -> Inputs:
        """Return these inputs with some replaced; None leaves one out."""
        return Inputs(self.name, {name: t for name, t in (self.named | named).items() if t is not None})

    def of_tokens(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Return these inputs with each tensor that has a row a token changed."""
        return self.replaced(**{name: change(self[name]) for name in self.kind.tokens})

    def part(self, start: int, end: int) -> Inputs:
        """Inputs of tokens [start, end)."""
        return self.of_tokens(lambda t: t[start:end])

    def _arguments(self) -> list[Tensor | None]:
        return [self.named.get(name) for name in self.kind.order]

    def _options(self, *names: str) -> dict[str, Tensor]:
        return {name: self[name] for name in names if name in self.named}

    def scan(
        self, lengths: Sequence[int], chunk_size: int = CHUNK, starts: Sequence[int] | None = None, **options: bool
    ) -> ScanOutput:
        chunks = cut_chunks(starts or [0] * len(lengths), lengths, chunk_size, self["x"].device)
        scan = self.kind.scan if self["x"].is_meta else on_device(self.kind.scan, platform.device())
        return scan(*self._arguments(), chunks, **self._options("D", "initial_states"), **options)

    def step(self, states: Tensor, **options: bool) -> tuple[Tensor, Tensor]:
        """One token of each sequence."""
        step = self.kind.step if self["x"].is_meta else on_device(self.kind.step, platform.device())
        return step(*self._arguments(), states, **self._options("D"), **options)

    def recur(self, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Outputs and the state after every token, by the formula."""
        skip = [self.named.get("D")] if "D" in self.kind.weights else []
        return self.kind.formula(*self._arguments(), *skip, lengths, self.named.get("initial_states"))


def random_inputs(
    kind: str, lengths: Sequence[int], decay: str = "slow", *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Inputs:
    """Random arguments of any sign; those with a scale in DECAYS have the sign that the operator expects."""
    generator, total = torch.Generator().manual_seed(seed), sum(lengths)
    shapes = {name: (total, *shape) for name, shape in KINDS[kind].tokens.items()} | KINDS[kind].weights
    shapes["initial_states"] = (len(lengths), *KINDS[kind].state)
    named = {}
    for name, shape in shapes.items():
        if name in DECAYS[decay]:
            values = torch.rand(shape, generator=generator, dtype=torch.float64)
            values = (values if name in ("g", "beta") else values + 0.5) * DECAYS[decay][name]
            named[name] = (-values if name in ("A", "g") else values).to(dtype)
        else:
            values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            named[name] = F.normalize(values, dim=-1) if name in ("q", "k") else values
    return Inputs(kind, named)


@functools.cache
def case(kind: str, lengths: tuple[int, ...], decay: str = "slow") -> tuple[Inputs, Tensor, Tensor]:
    """Inputs that no test changes, with the outputs and states of the formula."""
    inputs = random_inputs(kind, lengths, decay)
    return inputs, *inputs.recur(lengths)


def last_tokens(lengths: Sequence[int]) -> Tensor:
    return torch.tensor(lengths).cumsum(0) - 1


def assert_same(got: ScanOutput, want: ScanOutput, tokens: int | None = None) -> None:
    """Check that outputs of the first `tokens` and all states are equal to the bit."""
    assert torch.equal(got.y[:tokens], want.y[:tokens])
    assert torch.equal(got.final_states, want.final_states)
    assert torch.equal(got.chunk_states, want.chunk_states)


each_kind = pytest.mark.parametrize("kind", KINDS)
each_recurrence = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "convolution"])
MIXED = LENGTHS[-2]
CASES = [(lengths, "slow") for lengths in LENGTHS] + [(MIXED, "medium"), (MIXED, "fast"), ((64, 64), "fast")]


@each_kind
@pytest.mark.parametrize(("lengths", "decay"), long_except([*CASES[:-3], *CASES[-2:]], CASES), ids=str)
def test_scan_equals_recurrence(kind: str, lengths: tuple[int, ...], decay: str) -> None:
    """M1-1, M1-2, LA-2, HY-7, HY-9, HY-12: outputs, final and chunk states, at any chunk size and grid offset."""
    inputs, y, states = case(kind, lengths, decay)
    for chunk_size, shift in ((1, 0), (16, 5), (64, 0), (64, 63), (100, 30), (2048, 1866)):
        starts = [shift * (i + 1) for i in range(len(lengths))]
        if chunk_size == 1 and sum(lengths) > 100:
            continue
        got = inputs.scan(lengths, chunk_size, starts)
        ends = cut_chunks(starts, lengths, chunk_size, "cpu").cu_chunk_seqlens[1:] - 1
        assert_close(f"y, chunks of {chunk_size}", got.y, y)
        assert_states_close(f"chunk states, chunks of {chunk_size}", got.chunk_states, states[ends])
        assert_states_close(f"final states, chunks of {chunk_size}", got.final_states, states[last_tokens(lengths)])
        assert got.final_states.dtype == got.chunk_states.dtype == torch.float32


@each_kind
def test_without_initial_states_and_direct_path(kind: str) -> None:
    lengths = (3, 65, 1)
    inputs = random_inputs(kind, lengths, "medium").replaced(initial_states=None, D=None)
    y, states = inputs.recur(lengths)
    got = inputs.scan(lengths)
    assert_close("y", got.y, y)
    assert_states_close("final states", got.final_states, states[last_tokens(lengths)])


@pytest.mark.parametrize("window", [1, 2, 5])
def test_convolutions_of_any_window(window: int) -> None:
    """HY-4, HY-8, HY-11, FX-4: sequences shorter than the window carry older columns over; a state after each token."""
    lengths = (1, 5, 2, 12)
    inputs = random_inputs("convolution", lengths)
    inputs = inputs.replaced(
        weight=inputs["weight"].repeat(1, 2)[:, :window],
        initial_states=inputs["initial_states"].repeat(1, 1, 2)[..., : window - 1],
        bias=inputs["bias"] if window == 2 else None,
    )
    for without in ({}, {"initial_states": None}):
        given = inputs.replaced(**without)
        y, states = given.recur(lengths)
        got = given.scan(lengths, 1)
        assert_close("y", got.y, y, atol=1e-5)
        assert_states_close("states after any token", got.chunk_states, states)
        assert_states_close("final states", got.final_states, states[last_tokens(lengths)])


def test_long_fast_decay_keeps_the_last_tokens() -> None:
    """Sums of logarithms in the thousands: the small differences at their end still count."""
    inputs = random_inputs("ssd", [512], "fast")
    inputs["dt"][:, ::2] = 1e-4
    inputs["dt"][::9] = 3.0
    y, states = inputs.recur([512])
    got = inputs.scan([512], 256)
    assert_close("y", got.y, y, atol=1e-5, rtol=2e-5)
    assert_states_close("final state", got.final_states, states[-1:])


def zero_a_state(inputs: Inputs) -> None:
    inputs["initial_states"][1] = 0


def zero_one_head(inputs: Inputs) -> None:
    inputs["initial_states"][0, 2] = 0


def swap_states(inputs: Inputs) -> None:
    inputs["initial_states"][:] = inputs["initial_states"].flip(0)


def swap_decays_or_keys(inputs: Inputs) -> None:
    """Heads or channels read each other's decay, key or window."""
    name, axis = next((name, axis) for name, axis in (("A", 0), ("k", 1), ("weight", 0)) if name in inputs.named)
    inputs[name][:] = inputs[name].flip(axis)


class TestTheComparisonsCanFail:
    """Negative controls (HY-7, HY-9): with slow decay every wrong state is seen."""

    @each_kind
    @pytest.mark.parametrize("spoil", [zero_a_state, zero_one_head, swap_states, swap_decays_or_keys])
    def test_wrong_inputs(self, kind: str, spoil: Callable[[Inputs], None]) -> None:
        lengths = {"gated_delta_rule": (65, 500), "convolution": (1, 2)}.get(kind, (65, 100))
        _, want_y, states = case(kind, lengths)
        inputs = random_inputs(kind, lengths)
        spoil(inputs)
        got = inputs.scan(lengths)
        with pytest.raises(AssertionError, match="y:"):
            assert_close("y", got.y, want_y)
        if kind != "convolution" or spoil is not swap_decays_or_keys:
            with pytest.raises(AssertionError, match="final states:"):
                assert_states_close("final states", got.final_states, states[last_tokens(lengths)])

    @each_kind
    def test_state_of_another_boundary(self, kind: str) -> None:
        inputs, _, states = case(kind, (65, 100))
        got = inputs.scan((65, 100), 32)
        with pytest.raises(AssertionError, match="shifted"):
            assert_states_close("shifted", got.chunk_states[:2], states[[63, 64]])


@each_kind
class TestIsolation:
    """HY-10, HY-9: a state depends on its own tokens only."""

    @pytest.mark.parametrize("lengths", [(64,), (65,), (3, 70, 1)], ids=str)
    def test_padding_is_not_read(self, kind: str, lengths: tuple[int, ...]) -> None:
        """HY-10: bitwise, whatever the padding holds and however much there is; padding comes out as zeros."""
        options = {"normalize": True} if kind == "gated_delta_rule" else {}
        inputs = random_inputs(kind, lengths)
        plain = inputs.scan(lengths, **options)
        for padding, content in ((1, 0.0), (7, 1e30), (64, float("nan"))):
            rows = {
                name: inputs[name].new_full((padding, *inputs[name].shape[1:]), content) for name in inputs.kind.tokens
            }
            padded = {name: torch.cat([inputs[name], row]) for name, row in rows.items()}
            got = inputs.replaced(**padded).scan(lengths, **options)
            assert_same(got, plain, sum(lengths))
            assert not got.y[sum(lengths) :].any()

    def test_sequences_do_not_see_each_other(self, kind: str) -> None:
        """HY-7: NaN in the tokens and the state of one sequence stays there."""
        lengths, starts = (40, 30, 65), [0, 5, 9]
        inputs = random_inputs(kind, lengths)
        plain = inputs.scan(lengths, starts=starts)
        for name in inputs.kind.tokens:
            inputs[name][40:70] = float("nan")
        inputs["initial_states"][1] = float("nan")
        got = inputs.scan(lengths, starts=starts)
        for rows in (slice(0, 40), slice(70, 135)):
            assert torch.equal(got.y[rows], plain.y[rows])
        assert torch.equal(got.final_states[[0, 2]], plain.final_states[[0, 2]])
        assert got.y[40:70].isnan().all()


class TestGradients:
    """The scan is what training differentiates."""

    @each_kind
    @pytest.mark.parametrize(
        ("lengths", "chunk_size", "decay"),
        [((5, 1, 7), 3, "slow"), ((40,), 64, "medium"), ((64, 64), 64, "fast")],
        ids=str,
    )
    def test_equal_those_through_the_recurrence(
        self, kind: str, lengths: tuple[int, ...], chunk_size: int, decay: str
    ) -> None:
        inputs = random_inputs(kind, lengths, decay, dtype=torch.float64)
        leaves = [tensor.requires_grad_() for tensor in inputs.named.values()]
        generator = torch.Generator().manual_seed(7)
        y_weights, state_weights = (
            torch.randn(inputs[name].shape, generator=generator, dtype=torch.float64)
            for name in ("x", "initial_states")
        )

        def gradients(y: Tensor, states: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad((y * y_weights).sum() + (states * state_weights).sum(), leaves)

        got = inputs.scan(lengths, chunk_size)
        y, states = inputs.recur(lengths)
        pairs = zip(gradients(got.y, got.final_states), gradients(y, states[last_tokens(lengths)]), strict=True)
        for name, (found, expected) in zip(inputs.named, pairs, strict=True):
            assert_close(f"gradient of {name}", found, expected, atol=1e-9, rtol=1e-9)

    @each_recurrence
    @pytest.mark.parametrize("decay", [-1e-4, -100.0, -1e5])
    def test_are_finite_at_any_decay(self, kind: str, decay: float) -> None:
        inputs = random_inputs(kind, [70], "fast")
        inputs["A" if "A" in inputs.named else "g"].fill_(decay)
        options = {"normalize": True} if kind == "gated_delta_rule" else {}
        leaves = [tensor.requires_grad_() for tensor in inputs.named.values()]
        got = inputs.scan([70], 64, **options)
        grads = torch.autograd.grad(got.y.square().sum() + got.chunk_states.sum(), leaves)
        assert got.y.isfinite().all()
        assert all(grad.isfinite().all() for grad in grads)


@each_kind
def test_bf16_accumulates_in_fp32(kind: str) -> None:
    """Inputs in bf16: the states are those of the rounded inputs, in fp32; y is rounded once."""
    lengths = (65, 40)
    inputs = random_inputs(kind, lengths)
    names = ("x", "B", "C", "q", "k", "initial_states")
    rounded = inputs.replaced(**{name: inputs[name].bfloat16() for name in names if name in inputs.named})
    y, states = rounded.recur(lengths)
    got = rounded.scan(lengths)
    assert got.y.dtype == torch.bfloat16
    assert_states_close("final states", got.final_states, states[last_tokens(lengths)])
    assert_close("y", got.y, y, rtol=2**-8)
    step_y, step_state = rounded.part(0, 1).step(rounded["initial_states"][:1].float())
    assert step_y.dtype == torch.bfloat16
    assert_states_close("state after a step", step_state, states[:1])


@each_kind
def test_nothing_is_read_back(kind: str) -> None:
    """Tensors without data: an operator that asked one for a value, or left one on the host, would fail."""
    lengths = (33, 40, 1)
    inputs = random_inputs(kind, lengths)
    inputs = inputs.replaced(**{name: tensor.to("meta") for name, tensor in inputs.named.items()})
    states = inputs["initial_states"]
    got = inputs.scan(lengths, 16, [0, 3, 7])
    assert [t.shape for t in got] == [inputs["x"].shape, states.shape, (7, *inputs.kind.state)]
    y, state = inputs.part(0, 3).step(states)
    assert (y.shape, state.shape) == ((3, *inputs["x"].shape[1:]), states.shape)
