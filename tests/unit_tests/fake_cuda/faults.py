"""Mistakes that a real device would refuse, made on the fake one; each returns its outcome. Run by `child.py`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import torch

from megatron_ext.mcore.controller import InferenceController
from megatron_ext.runner.cuda_graphs.input_buffers import AsyncModelOutput, HostBuffer, InputBuffers
from megatron_ext.runner.layout import Layout
from tests.unit_tests.fake_cuda import lives
from tests.unit_tests.fake_cuda.lives import config_of
from tests.unit_tests.support.fake_cuda import watching

CUDA = torch.device("cuda", 0)


def outcome(work: Callable[[], object]) -> str:
    """Result of the work as text, or its error."""
    try:
        return str(work())
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        return f"{type(error).__name__}: {error}"


def wait_noted(work: Callable[[], object]) -> str:
    """The kinds of waits."""
    with watching.watched() as notes:
        work()
    return ", ".join(sorted({f"{one.kind}: {one.what}" for one in watching.waits(notes)}))


def requests_fail(life: str) -> str:
    """Errors reported to the requests of a life."""
    found = lives.LIVES[life](nullcontext())
    return "; ".join(sorted({str(one["error"]) for one in found["requests"]}))


# Without an engine


def _written_early() -> object:
    places = InputBuffers([Layout({"a": (4,)}, frozenset())], CUDA)
    layout = Layout({"a": (4,)}, frozenset())
    for number in range(3):  # two buffers: the third is the first again
        arrays = places.open(layout)
        arrays["a"][:] = number
        places.send(layout)
    torch.cuda.synchronize()
    return places.parts(layout)["a"].tolist()


def _read_early() -> object:
    answers = AsyncModelOutput(torch.arange(4, device=CUDA), CUDA)
    return answers.fetch(3)().tolist()


def _without_waiting(work: Callable[[], object]) -> Callable[[], object]:
    def broken() -> object:
        with mock.patch.object(HostBuffer, "wait"):
            found = work()
            watching.complete(torch.ops.pretended.last_copy())
            return found

    return broken


def _captured_wait() -> object:
    x = torch.ones(2, device=CUDA)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        return float(x.sum())


# In an engine


def _index_on_the_host() -> object:
    with mock.patch("megatron_ext.memory.state_pool.to_device", lambda tensor, device: tensor):
        return requests_fail("hybrid")


def _reading_forward() -> Callable[[InferenceController], torch.Tensor | None]:
    forward = InferenceController.forward

    def reading(self: InferenceController) -> torch.Tensor | None:
        logits = forward(self)
        assert logits is not None
        logits.max().item()
        return logits

    return reading


def _wait_in_a_step() -> str:
    with mock.patch.object(InferenceController, "forward", _reading_forward()):
        return wait_noted(lambda: lives.LIVES["hybrid"](nullcontext()))


def _wait_in_a_program() -> object:
    with mock.patch.object(InferenceController, "forward", _reading_forward()):
        return lives.LIVES["programs"](nullcontext())


def _places_written_early() -> object:
    with mock.patch.object(HostBuffer, "wait"):
        return requests_fail("programs")


# Memory


def _free() -> int:
    return torch.cuda.mem_get_info()[0]


def _suspended() -> object:
    """Bytes that a suspend returns to other processes and a resume takes again: at least the blocks' bytes."""
    engine = lives.engine_of("hybrid", block_count=4000)
    pools, full = engine.context.allocated.kv.nbytes, _free()
    engine.suspend()
    empty = _free()
    engine.resume()
    return empty - full >= pools and empty - _free() >= pools


def _one_after_the_other() -> object:
    """Pools of half of the device and more, of engines that are gone when the next one comes."""
    before = _memory_of(200 << 20)
    try:
        for _ in range(3):
            engine = lives.engine_of("attention_only", block_count=20_000)
            share = engine.context.allocated.kv.nbytes / (200 << 20)
            engine.suspend()
            del engine
            gc.collect()
        return share > 0.5
    finally:
        _memory_of(before)


def _too_large() -> object:
    before = _memory_of(200 << 20)
    try:
        return lives.engine_of("attention_only", block_count=60_000)
    finally:
        _memory_of(before)


def _memory_of(size: int) -> int:
    """Let the device have so many bytes; how many it had."""
    gc.collect()  # engines of other lives
    before: int = torch.cuda.mem_get_info()[1]
    torch.ops.pretended.set_total(size)
    return before


def _too_large_a_step() -> object:
    """Pools that fit into the device, which then lacks the memory of a step; nothing is counted for it."""
    gc.collect()
    before = _memory_of(torch.cuda.memory_allocated() + (16 << 20))
    try:
        with mock.patch("megatron_ext.memory.engine_plan.activation_bytes", return_value=0):
            return lives.engine_of("attention_only", max_sequence_length=2048, max_tokens=4096)
    finally:
        _memory_of(before)


def _profile_run() -> object:
    """True if the start of an engine has taken the memory of its largest step, and keeps none of it."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    engine = lives.engine_of("hybrid", max_sequence_length=2048, max_tokens=2048)
    stream = engine.context.max_tokens * 4 * config_of("hybrid").hidden_size  # one tensor of hidden states in fp32
    taken = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    return taken > 2 * stream and engine.context.step is None


FAULTS: dict[str, Callable[[], object]] = {
    "two devices": lambda: torch.ones(2, device=CUDA) + torch.ones(2),
    "new memory": lambda: bool(torch.empty(5, device=CUDA).isnan().all().item()),
    "item": lambda: wait_noted(lambda: torch.ones(1, device=CUDA).item()),
    "written in time": _written_early,
    "written early": _without_waiting(_written_early),
    "read early": _without_waiting(_read_early),
    "wait while captured": _captured_wait,
    "suspended": _suspended,
    "one after the other": _one_after_the_other,
    "too large": _too_large,
    "too large a step": _too_large_a_step,
    "profile run": _profile_run,
    "buffer of the default": lambda: lives.engine_of("attention_only", block_count=None, max_tokens=None),
    "engine: index on the host": _index_on_the_host,
    "engine: wait in a step": _wait_in_a_step,
    "engine: wait in a program": _wait_in_a_program,
    "engine: places written early": _places_written_early,
}
