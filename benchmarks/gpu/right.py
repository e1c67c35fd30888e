"""Correctness checks of a small model in fp32 and bf16 on the device, and of tiled SSD in bf16."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.cases import Figure, Run, token_ids
from benchmarks.models import Engine
from megatron_ext.config import RequestParams
from megatron_ext.config.request import TokenBiases
from megatron_ext.mcore import platform
from megatron_ext.ops.backends import preferring
from megatron_ext.ops.ssd import SSD
from megatron_ext.ops.state_slots import PrefillStates, StateSlots
from megatron_ext.ops.varlen import Resumes, pack_chunks
from megatron_ext.runner.cuda_graphs.cuda_graph_runner import CudaGraphRunner
from megatron_ext.scheduling.record import RequestRecord

PARITY = {torch.float32: 2e-3, torch.bfloat16: 0.1}
"""Largest differences of log-probs: products in fp32 may be rounded to tf32; in bf16 each operation rounds, and other
kernels do so in other places. Equal tokens are not asked for: a device's libraries choose a product's algorithm by the
number of rows, and padded steps have more of them."""
LENGTHS, GENERATED = (200, 65, 64, 7), 24
EAGER, GRAPHS = {"cuda_graph_impl": "none"}, {"cuda_graph_impl": "local"}
PROCESSED: dict[str, Any] = {
    "top_n_logprobs": 3,
    "temperature": 0.8,
    "seed": 11,
    "min_p": 0.01,
    "top_p": 0.95,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "logit_bias": TokenBiases.of({5: 1.5}),
}
DIFFERENCE, IS_RIGHT = "log-probs differ by", "right"


class Checks:
    """Checks of one model; each is a row.

    Args:
        run: Receives the rows.
        build: Builds an engine around the model; takes fields of `BatchingConfig`.
        vocabulary: Number of token ids.
        dtype: Type of the model; one of `PARITY`.
    """

    def __init__(self, run: Run, build: Callable[..., Engine], vocabulary: int, dtype: torch.dtype) -> None:
        self._run, self._build = run, build
        self._parity, self._type = PARITY[dtype], str(dtype).removeprefix("torch.")
        self._prompts = [token_ids(length, f"right {length}", vocabulary) for length in LENGTHS]
        self._plain = RequestParams(num_tokens_to_generate=GENERATED, ignore_eos=True)
        self._scored = dataclasses.replace(self._plain, return_log_probs=True, skip_prompt_log_probs=True)

    def all(self) -> None:
        """Run all checks."""
        checks = [self.log_probs, self.cached_prefix, self.graphs, self.processed_logits]
        if self._type == "float32":
            checks += [self.tiles, self.launches]
        for check in checks:
            self._run.attempt(f"check of {check.__name__} in {self._type}", check)

    def log_probs(self) -> None:
        """Compare the log-probs of the device's and of the reference operators."""
        self._compare(
            "log-probs", self._serve(self._scored, operator_backend="reference", **EAGER), EAGER, self._scored
        )

    def processed_logits(self) -> None:
        """Compare the log-probs, processed logits and draws of replayed and of eager steps."""
        params = dataclasses.replace(self._scored, **PROCESSED)
        self._compare("graphs with logits processing", self._serve(params, **EAGER), GRAPHS, params)

    def _compare(
        self, name: str, expected: list[RequestRecord], batching: dict[str, str], params: RequestParams
    ) -> None:
        found = self._serve(params, **batching)
        apart = max(difference(one, other) for one, other in zip(found, expected, strict=True))
        alike = min(alike_tokens(one, other) for one, other in zip(found, expected, strict=True))
        figures = {DIFFERENCE: apart, "equal tokens at least": alike}
        is_right = apart <= self._parity and (alike > 0 or params is self._scored or self._type != "float32")
        self._run.row(f"{name}, {self._type}", {**figures, IS_RIGHT: is_right})

    def graphs(self) -> None:
        """Compare the log-probs of replayed and of eager steps."""
        self._compare("graphs", self._serve(self._scored, **EAGER), GRAPHS, self._scored)

    def cached_prefix(self) -> None:
        """Compare a request after a cached prefix with the same request served before."""
        built = self._build(**EAGER)
        first, second = (built.generate([self._prompts[0]], self._scored)[0] for _ in range(2))
        built.core.suspend()
        apart, skipped = difference(second, first), second.skipped_prefill_token_count
        is_right = apart <= self._parity and skipped > 0
        self._run.row(f"cached prefix, {self._type}", {DIFFERENCE: apart, IS_RIGHT: is_right})

    def tiles(self) -> None:
        """Compare tiled SSD in bf16 with plain torch, and one prefill with the same cut in two at a block."""
        self._run.row("ssd by tiles", check_tiles(platform.device()))

    def launches(self) -> None:
        """Check that decode steps are launched without waiting for the device; on a CPU each step waits."""
        if torch.cuda.is_available():
            self._run.row("no step of decode waits", {IS_RIGHT: self._launches_without_waiting()})

    def _launches_without_waiting(self) -> bool:
        built = self._build(**GRAPHS)
        built.start_decoding(self._prompts, self._plain)
        try:
            with waiting_is_an_error() as launches:
                for _ in range(4):
                    built.step()
        except RuntimeError as error:
            self._run.remark(f"a step of decode waits for the device: {error}")
            return False
        finally:
            built.core.suspend()
        return launches[0] > 0

    def _serve(self, params: RequestParams, **batching: str) -> list[RequestRecord]:
        built = self._build(**batching)
        records = built.generate(self._prompts, params)
        built.core.suspend()
        return records


def difference(one: RequestRecord, other: RequestRecord) -> float:
    """Return the largest difference of log-probs up to the first differing tokens.

    Those must be about as likely, since random weights have near ties.
    """
    found = 0.0
    pairs = zip(one.generated_tokens, other.generated_tokens, one.generated_log_probs, other.generated_log_probs)  # noqa: B905 - requested; ties end it
    for token, like, log_prob, value in pairs:
        found = max(found, abs(log_prob - value))
        if token != like:
            break
    return found


def alike_tokens(one: RequestRecord, other: RequestRecord) -> int:
    """Return the number of tokens before the first that differ; random weights have near ties, and draws borders."""
    pairs = zip(one.generated_tokens, other.generated_tokens, strict=True)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@contextmanager
def waiting_is_an_error() -> Iterator[list[int]]:
    """Make waiting an error in captured forwards and their sampling. The list counts the captured steps."""
    count = [0]

    def watched(function: Callable[..., object], is_counted: int) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            count[0] += is_counted
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    with (
        mock.patch.object(CudaGraphRunner, "forward", watched(CudaGraphRunner.forward, 1)),
        mock.patch.object(CudaGraphRunner, "sample", watched(CudaGraphRunner.sample, 0)),
    ):
        yield count


# Tiled SSD, which small models in fp32 do not use

TOKENS, CUT, HEADS, GROUPS, CHANNELS, STATES, BLOCK = 1000, 640, 20, 2, 64, 128, 64
OUTPUTS, LAST_STATES = 2.0**-6, 2.0**-12
"""Largest differences of outputs in bf16 and states in fp32, relative to the largest value."""


class Layer:
    """Random inputs of one sequence, and the slot of its state."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(7)
        shapes = ((TOKENS, HEADS, CHANNELS), (TOKENS, GROUPS, STATES), (TOKENS, GROUPS, STATES))
        self._x, self._b, self._c = (torch.randn(one, generator=generator).bfloat16().to(device) for one in shapes)
        self._dt = (torch.rand(TOKENS, HEADS, generator=generator) * 0.1 + 0.01).to(device)
        self._a = -(torch.rand(HEADS, generator=generator) + 0.1).to(device)
        self._live = torch.full((2, HEADS, CHANNELS, STATES), torch.nan, device=device)

    def prefill(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Compute tokens [start, end) from a zero state or from the end of the last call: outputs, and last state."""
        device = self._x.device
        ends = torch.full((1,), end, device=device)
        cuts = [min(BLOCK, end - one) for one in range(start, end, BLOCK)]
        chunks = dataclasses.replace(pack_chunks([cuts], device), resumes=Resumes(BLOCK, ends))
        slots = StateSlots(torch.ones_like(ends), torch.full((1,), start > 0, device=device))
        x, dt, b, c = (t[start:end] for t in (self._x, self._dt, self._b, self._c))
        y = SSD.prefill(x, dt, self._a, b, c, states=PrefillStates(chunks, slots, self._live, None))
        return y, self._live[1].clone()


@torch.inference_mode()
def check_tiles(device: torch.device) -> dict[str, Figure]:
    """Return differences from the reference operators, and whether a cut at a block gives the same bits."""
    with preferring("reference"):
        expected = Layer(device).prefill(0, TOKENS)
    outputs, state = Layer(device).prefill(0, TOKENS)
    parts = Layer(device)
    cut = [parts.prefill(0, CUT), parts.prefill(CUT, TOKENS)]
    errors = [_apart(one, other) for one, other in zip((outputs, state), expected, strict=True)]
    same = bool(torch.equal(torch.cat([y for y, _ in cut]), outputs) and torch.equal(cut[-1][1], state))
    is_right = errors[0] <= OUTPUTS and errors[1] <= LAST_STATES
    return {
        "outputs differ by": errors[0],
        "states differ by": errors[1],
        "same bits if cut": "yes" if same else "no",
        IS_RIGHT: is_right and (same or device.type != "cuda"),  # kernels promise the bits, see docs/kernels.md
    }


def _apart(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest number; NaN is infinitely far."""
    gap = (found.double() - expected.double()).abs() / expected.double().abs().max()
    return float(gap.nan_to_num(torch.inf).max())
