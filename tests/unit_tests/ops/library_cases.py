"""Packed sequences and single tokens through our kernels, and the same inputs for libraries that compute the same."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_ext.mcore import platform
from megatron_ext.ops import triton
from megatron_ext.ops.state_slots import DecodeStates, PrefillStates, SnapshotPlaces, StateSlots
from tests.unit_tests.ops.conftest import moved
from tests.unit_tests.ops.library_process import COMPUTE
from tests.unit_tests.ops.state_cases import Operator, operator
from tests.unit_tests.support.chunk_grid import cut_chunks
from tools.oracles import LIBRARIES

Tensors = dict[str, Tensor]

CHUNK = 64
LENGTHS = (65, 3, 64, 17)  # tokens of the sequences
STARTS = (31, 0, 64, 1)  # of the sequences, from their beginnings: where chunks are cut
LIVE = (4, 0, 7, 2)  # of 9 slots
SLOTS = 9
NAMES = {
    "causal_conv1d": ("x", "weight", "bias"),
    "ssd": ("x", "dt", "A", "B", "C"),
    "selective_scan": ("u", "delta", "A", "B", "C"),
    "gated_delta_rule": ("q", "k", "v", "g", "beta"),
}
"""Operator -> what its arguments are called in `library_process`."""
SIZES = {"causal_conv1d": 4, "ssd": 16, "selective_scan": 16, "gated_delta_rule": 16}
STATES = {
    "causal_conv1d": (130, 3),
    "ssd": (4, 18, 16),
    "selective_scan": (20, 16),
    "gated_delta_rule": (4, 16, 18),
}
"""Operator -> shape of a state."""


@dataclass(frozen=True)
class Case:
    """An operator's prefill or decode: "ssd prefill", "ssd decode"."""

    name: str
    dtype: torch.dtype

    @property
    def operator(self) -> str:
        return self.name.split()[0]

    @property
    def is_decode(self) -> bool:
        return self.name.endswith("decode")

    def made(self) -> Operator:
        return operator(self.operator, SIZES[self.operator], self.dtype)

    def arguments(self) -> tuple[Tensor, ...]:
        made, rows = self.made(), len(LIVE) if self.is_decode else sum(LENGTHS)
        return made.order(*(t[:rows].contiguous() for t in made.tokens))

    def pool(self) -> Tensor:
        """[slots, ...]: of what a convolution has seen in the inputs' type, of the others fp32."""
        is_inputs = self.operator == "causal_conv1d"
        generator = torch.Generator().manual_seed(5)
        states = torch.randn(SLOTS, *STATES[self.operator], generator=generator)
        return states.to(self.dtype) if is_inputs else states

    def states(self) -> Tensor:
        """[S, ...] of the sequences, zero where one begins."""
        states = self.pool()[list(LIVE)]
        states[[start == 0 for start in STARTS]] = 0.0
        return states

    def inputs(self) -> Tensors:
        """Inputs of a library."""
        named: Tensors = dict(zip(NAMES[self.operator], self.arguments(), strict=True))
        named |= {name: value for name, value in self.made().options.items() if isinstance(value, Tensor)}
        if self.is_decode:
            return named | {"pool": self.pool(), "slots": torch.tensor(LIVE)}
        chunks = cut_chunks(STARTS, LENGTHS, CHUNK, "cpu")
        named["starts"] = chunks.sequences.cu_seqlens.clone()
        named["states"] = self.states()
        if self.name == "ssd prefill":
            named["chunk_starts"], named["last"] = chunks.cu_chunk_seqlens.clone(), chunks.last_chunk_indices.clone()
            named["chunk_sequences"] = chunks.chunk_seq_idx.clone()
        return named

    def computed(self, order: Sequence[int] = range(len(LIVE))) -> Tensors:
        """Outputs of our kernels; with another `order` sequences continue each other's states."""
        run, made, device = self.made().run, self.made(), platform.device()
        arguments, options = moved(self.arguments(), device), moved(made.options, device)
        with run.backends.forced(triton.NAME):
            if self.is_decode:
                live = self.pool().to(device)
                y = run.decode(*arguments, states=DecodeStates(torch.tensor(LIVE, device=device), live), **options)
                return {"y": y.cpu(), "pool": live.cpu()}
            return self._prefilled(run, arguments, options, order)

    def _prefilled(self, run, arguments: tuple[Tensor, ...], options: dict, order: Sequence[int]) -> Tensors:
        device = platform.device()
        chunks = cut_chunks(STARTS, LENGTHS, CHUNK, device)
        live = torch.full((SLOTS, *STATES[self.operator]), torch.nan, dtype=self.pool().dtype, device=device)
        live[list(LIVE)] = self.states()[list(order)].to(device)
        count = len(chunks.chunk_lengths)
        places = torch.arange(count, device=device)
        ends = chunks.last_chunk_indices + 1
        kept = SnapshotPlaces(places, torch.cat([ends[:1] * 0, ends]), places, chunks.cu_chunk_seqlens[1:])
        has_states = torch.ones(len(LIVE), dtype=torch.bool, device=device)
        slots = StateSlots(torch.tensor(LIVE, device=device), has_states, kept)
        snapshots = torch.full((count, *live.shape[1:]), torch.nan, dtype=live.dtype, device=device)
        y = run.prefill(*arguments, states=PrefillStates(chunks, slots, live, snapshots), **options)
        return {"y": y.cpu(), "states": live[list(LIVE)].cpu(), "chunk_states": snapshots.cpu()}


def dtypes() -> list[torch.dtype]:
    """Libraries multiply in 16 bits; Triton's interpreter cannot."""
    return [torch.float32] if triton.is_interpreted() else [torch.float32, torch.bfloat16]


def cases(library: str) -> list[Case]:
    """Cases that a library computes."""
    return [Case(name, dtype) for name in COMPUTE[library] for dtype in dtypes()]


@functools.cache
def answers(library: str) -> dict[Case, Tensors]:
    """Answers of a library to all of its cases, from one process."""
    folder = next(one for one in LIBRARIES if one.name == library).packages
    process = Path(__file__).with_name("library_process.py")
    asked = cases(library)
    with tempfile.TemporaryDirectory() as scratch:
        inputs, outputs = Path(scratch) / "inputs.pt", Path(scratch) / "outputs.pt"
        torch.save([(case.name, case.inputs()) for case in asked], inputs)
        command = [sys.executable, "-I", str(process), library, str(folder), str(inputs), str(outputs)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        return dict(zip(asked, torch.load(outputs, weights_only=True), strict=True))


def relative_errors(ours: Tensors, theirs: Tensors) -> dict[str, float]:
    """Relative errors of the shared outputs: the largest difference over the largest value."""
    shared = [name for name in theirs if name in ours]
    errors = {}
    for name in shared:
        assert ours[name].shape == theirs[name].shape, name
        difference = (ours[name].double() - theirs[name].double()).abs().max()
        errors[name] = (difference / theirs[name].double().abs().max()).item()
    return errors
