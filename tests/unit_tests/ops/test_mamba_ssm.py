"""CU-15: one-token updates by mamba-ssm and causal-conv1d on our slots.

What they are called with is tested with stand-ins of the documented signatures. mamba-ssm's kernel itself is Triton: it
runs under the interpreter where `make oracles` has fetched it, and on a device where both packages are installed.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_ext.mcore import platform
from megatron_ext.ops import libraries, triton
from megatron_ext.ops.libraries import MAMBA_SSM
from tests.unit_tests.ops.conftest import moved
from tests.unit_tests.ops.library_stand_ins import UPDATES, SelectiveStateUpdate, install
from tests.unit_tests.ops.oracles import assert_close
from tests.unit_tests.ops.state_cases import Operator, operator
from tools import oracles

LENGTHS = (5, 3, 2)  # tokens of the sequences, the decoded one included
SLOTS, LIVE, PADDING = 7, (4, 0, 2), 2
SIZES = {"ssd": 5, "selective_scan": 5, "causal_conv1d": 4, "plain_conv1d": 2}
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Decode:
    """One decode of three requests, behind two rows of padding, from the states before their last tokens."""

    def __init__(self, name: str, dtype: torch.dtype, states: torch.dtype) -> None:
        self.case: Operator = operator(name, SIZES[name], dtype, total=sum(LENGTHS))
        self.dtype, self.states, self.device = dtype, states, platform.device()
        self.parts = list(zip(*(t.split(LENGTHS) for t in self.case.tokens), strict=True))
        self.truths = [self.case.truth(part, [len(part[0])]) for part in self.parts]
        shape = self.truths[0][1].shape[1:]
        self.live = torch.full((SLOTS, *shape), torch.nan, dtype=states, device=self.device)
        for slot, (_, after) in zip(LIVE, self.truths, strict=True):
            self.live[slot] = after[-2].to(states)

    def run(self, rows: int | None = None) -> Tensor:
        """Outputs; with `rows`, of so many requests in consecutive slots, given as a slice."""
        if rows is not None:
            self.live = self.live[list(LIVE)]
        padding, count = (0, rows) if rows else (PADDING, len(LIVE))
        own = [torch.stack([part[i][-1] for part in self.parts[:count]]) for i in range(len(self.case.tokens))]
        inputs = self.case.order(*(torch.cat([t.new_full((padding, *t.shape[1:]), torch.nan), t]) for t in own))
        slots = torch.tensor([-1] * padding + list(LIVE), device=self.device)
        options = {name: moved(value, self.device) for name, value in self.case.options.items()}
        with self.case.run.backends.forced(MAMBA_SSM):
            where = slice(0, rows) if rows else slots
            y = self.case.run.decode(*moved(inputs, self.device), slots=where, live=self.live, **options)
        assert not y[:padding].any()
        return y[padding:].cpu()

    def check(self, y: Tensor) -> None:
        """Outputs and states are those of the formula; other slots are untouched."""
        want, bound = torch.stack([truth[0][-1] for truth in self.truths]), BOUNDS[self.dtype]
        rounding = BOUNDS[self.states] * float(want.abs().max())
        assert_close("outputs", y, want, atol=bound + rounding, rtol=bound)
        for slot, (_, after) in zip(LIVE, self.truths, strict=True):
            bound = BOUNDS[self.states]
            assert_close(f"slot {slot}", self.live[slot].cpu(), after[-1], atol=bound, rtol=bound)
        assert self.live[[slot for slot in range(SLOTS) if slot not in LIVE]].isnan().all()


def conv_states(name: str, dtype: torch.dtype, states: torch.dtype) -> torch.dtype:
    """The library's convolution has states of the inputs' type."""
    return dtype if name.endswith("conv1d") else states


@pytest.fixture
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], SelectiveStateUpdate]:
    """Install the stand-in of an operator's package."""

    def make(name: str) -> SelectiveStateUpdate:
        package, kind = UPDATES[name]
        made = kind()
        install(monkeypatch, package, made)
        return made

    return make


@pytest.mark.parametrize(
    ("dtype", "states"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("name", UPDATES)
def test_updates_in_our_slots(name: str, dtype: torch.dtype, states: torch.dtype, stand_in) -> None:
    """CU-15: padding, untouched slots, no copy of the pool or of an input; step sizes of a head by strides of zero."""
    decode, library = Decode(name, dtype, conv_states(name, dtype, states)), stand_in(name)
    decode.check(decode.run())
    (call,) = library.calls
    assert call["state"].data_ptr() == decode.live.data_ptr()
    assert call["state"].stride() == decode.live.stride()
    assert (call["indices"][:PADDING] == -1).all()
    if name == "ssd":
        strides = [call[of].stride(-1) for of in ("dt", "A", "dt_bias")] + [call["A"].stride(-2)]
        assert strides == [0] * 4, "the library's test of equal channels"


@pytest.mark.parametrize("name", UPDATES)
def test_consecutive_slots_are_a_view(name: str, stand_in) -> None:
    decode, library = Decode(name, torch.float32, torch.float32), stand_in(name)
    y = decode.run(rows=2)
    assert_close("outputs", y, torch.stack([truth[0][-1] for truth in decode.truths[:2]]), atol=1e-5, rtol=1e-5)
    (call,) = library.calls
    assert call["indices"] is None
    assert call["state"].data_ptr() == decode.live.data_ptr()
    assert len(call["state"]) == 2
    assert_close("state", decode.live[1].cpu(), decode.truths[1][1][-1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["ssd", "selective_scan"])
def test_without_a_skip(name: str, stand_in) -> None:
    """The library fails without D, which stands for zeros here."""
    decode, library = Decode(name, torch.float32, torch.float32), stand_in(name)
    decode.case.options = {}
    decode.run()
    assert not library.calls[0]["D"].any()


@pytest.mark.parametrize("name", UPDATES)
def test_states_of_the_token_before_are_seen(name: str, stand_in) -> None:
    """Negative control."""
    decode = Decode(name, torch.float32, torch.float32)
    stand_in(name)
    decode.live[list(LIVE)] = decode.live[list(LIVE)].roll(1, 0)
    with pytest.raises(AssertionError):
        decode.check(decode.run())


def fetched_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have mamba-ssm's kernel found: the installed one on a device, the fetched one under the interpreter."""
    package = libraries.SELECTIVE_STATE_UPDATE
    if not triton.is_interpreted():
        problem = package.problem()
        if problem is not None:
            pytest.skip(problem)
        return
    fetched = next(one for one in oracles.LIBRARIES if one.name == package.distribution)
    if not fetched.folder.is_dir():
        pytest.skip(f"{package.distribution} is not compared with; make oracles fetches it")
    parts = package.module.split(".")
    for count in range(1, len(parts)):  # without what their `__init__` imports: compiled parts
        folder = types.ModuleType(".".join(parts[:count]))
        folder.__path__ = [str(fetched.packages.joinpath(*parts[:count]))]
        monkeypatch.setitem(sys.modules, folder.__name__, folder)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
    monkeypatch.delitem(sys.modules, package.module, raising=False)
    found = importlib.import_module(package.module)
    monkeypatch.setitem(sys.modules, package.module, found)


@pytest.mark.kernels
@pytest.mark.skipif(triton.problem(platform.device()) is not None, reason="no kernel runs here")
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["ssd", "selective_scan"])
def test_its_kernel_computes_the_formula(
    name: str, dtype: torch.dtype, states: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CU-15: the library's own kernel by our calls of it."""
    fetched_update(monkeypatch)
    decode = Decode(name, dtype, states)
    decode.check(decode.run())


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["causal_conv1d", "plain_conv1d"])
def test_its_convolution_computes_the_formula(name: str) -> None:
    """CU-15: compiled for CUDA, so this needs a device and the package."""
    if platform.device().type != "cuda":
        pytest.skip("causal-conv1d's update is compiled for CUDA, and there is no device")
    problem = libraries.CAUSAL_CONV1D_UPDATE.problem()
    if problem is not None:
        pytest.skip(problem)
    decode = Decode(name, torch.bfloat16, torch.bfloat16)
    decode.check(decode.run())
