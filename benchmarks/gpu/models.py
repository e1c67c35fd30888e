"""Models of each recurrent kind on a device: correctness of a small one in fp32 and bf16, then speed of a large one."""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import Any

import torch

from benchmarks.cases import Run, case
from benchmarks.gpu.device_time import idle_share
from benchmarks.gpu.right import PARITY, Checks
from benchmarks.gpu.work import LARGE, OWN, QUICK, SMALL, WORK, Prompt, Work, first_tokens, tokens_a_second
from benchmarks.measuring import Phases, synchronize
from benchmarks.models import Engine, engine, loaded_model
from megatron_ext.config import CacheConfig, ModelConfig, RequestParams
from megatron_ext.engine import async_scheduling
from megatron_ext.engine.core import EngineCore
from megatron_ext.mcore import platform
from megatron_ext.mcore.step_executor import StepExecutor
from megatron_ext.models.build import build_model
from megatron_ext.models.load import LoadedModel
from megatron_ext.runner.cuda_graphs.async_output import Launched
from megatron_ext.runner.cuda_graphs.cuda_graph_runner import CudaGraphRunner
from megatron_ext.scheduling.async_planning import AsyncPlanner
from megatron_ext.scheduling.scheduler import Scheduler

BLOCK = 64
GRAPHS = 4  # sizes of decode batches: capturing the default of 16 for each engine would take the time of the rest
KINDS = ("mamba2", "gated_delta_net", "mamba1")
DELTA_HEADS = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
SMALL_DELTA_HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
HOW = {"graphs": "local", "eager": "none"}
FIRST = RequestParams(num_tokens_to_generate=1, ignore_eos=True)
PHASES: dict[str, tuple[object, str]] = {
    "rest of the step": (EngineCore, "step"),
    "plan": (Scheduler, "schedule"),
    "plan_next": (AsyncPlanner, "plan_next"),  # instead of a plan, where a step is launched ahead of tokens
    "describe": (Scheduler, "describe"),
    "describe ahead": (async_scheduling, "describe_step"),
    "write and send": (CudaGraphRunner, "_send"),
    "launch": (StepExecutor, "_launch"),
    "wait": (Launched, "result"),
    "commit": (Scheduler, "commit"),
    "report": (EngineCore, "report"),
}


def model_config(kind: str, *, small: bool) -> ModelConfig:
    """Return the shape of a model with recurrent layers of this kind."""
    heads = SMALL_DELTA_HEADS if small else DELTA_HEADS
    return ModelConfig(
        **(SMALL if small else LARGE), recurrent_layer=kind, **(heads if kind == "gated_delta_net" else {})
    )


def filled_model(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 3) -> LoadedModel:
    """Build a model with random weights made on the device: billions of weights take minutes on a host."""
    model = build_model(config, dtype=dtype, device=device, seed=seed, perform_initialization=False)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and name.endswith(".weight"):
                parameter.normal_(std=0.02, generator=generator)
    return loaded_model(model, config)


def roomy_engine(loaded: LoadedModel, requests: int, length: int, slots: int = 8, **batching: Any) -> Engine:
    """Build an engine with room for three times the longest requests and for `slots` snapshots per request.

    Steps have the default number of tokens of a CUDA device.
    """
    return engine(
        loaded,
        CacheConfig(snapshot_slots=slots * requests),
        block_size=BLOCK,
        block_count=3 * requests * (length // BLOCK + 2),
        max_requests=requests,
        max_tokens=max(256, requests, min(16_384, length)),
        num_cuda_graphs=GRAPHS,
        **batching,
    )


class Speed:
    """Speed measurements of one model.

    Args:
        run: Receives the figures.
        loaded: The model.
        work: Amount of work.
    """

    def __init__(self, run: Run, loaded: LoadedModel, work: Work) -> None:
        self._run, self._loaded, self._work = run, loaded, work

    def measure(self) -> None:
        """Run the measurements, the most telling ones first."""
        run, work = self._run, self._work
        for how in HOW:
            for count in work.decodes:
                run.attempt(f"{count} decode, {how}", partial(self._decode, count, how), like="decode")
        for prefix in work.prefixes:
            for count in work.counts:
                part = partial(self._first_tokens, prefix, count)
                run.attempt(f"{prefix} tokens, {count} at once", part, like=f"{prefix}")
        if torch.cuda.is_available():
            run.row("model", {"most memory, GiB": torch.cuda.max_memory_allocated() / 2**30})

    def _first_tokens(self, prefix: int, count: int) -> None:
        """Measure cold and warm; small steps are replayed as graphs where one request comes at a time."""
        graphs = {"cuda_graph_impl": "local"} if count == 1 else {}
        built = self._engine(count, prefix + OWN + 1, **graphs)
        try:

            def serve(prompts: list[Prompt]) -> object:
                return built.generate(prompts, FIRST)

            first_tokens(self._run, serve, synchronize, prefix, count, self._work.vocabulary)
        finally:
            _free(built)

    def _decode(self, count: int, how: str) -> None:
        """Measure tokens a second, the device's idle share, and the host's time by phase."""
        work, start = self._work, time.perf_counter()
        built = self._engine(count, work.context + work.generated, slots=2, cuda_graph_impl=HOW[how])
        made, row, few = time.perf_counter() - start, f"{count} decode", max(1, work.steps // 2)
        try:
            built.start_decoding(work.decode_prompts(count), RequestParams(work.generated, ignore_eos=True))
            rate = tokens_a_second(built.step, synchronize, count, work.steps)
            name = "tokens/s" if how == "graphs" else f"{how} tokens/s"
            self._run.row(row, {name: rate})  # before anything else can fail
            self._run.row(row, {f"{how}, device idle": idle_share(built.step, few)})
            if how == "graphs":
                with Phases().timing(PHASES) as phases:
                    for _ in range(few):
                        built.step()
                found = phases.per_step(few)
                phase_row = {f"{phase}, ms": ms for phase, ms in found.items()} | {"engine made in s": made}
                self._run.row(f"{row}, host", phase_row)
        finally:
            _free(built)

    def _engine(self, requests: int, length: int, slots: int = 8, **batching: Any) -> Engine:
        """Build an engine that takes requests of the longest length, as the peer's one engine does."""
        longest = self._work.longest + BLOCK
        return roomy_engine(self._loaded, requests, length, slots, max_sequence_length=longest, **batching)


def _free(built: Engine) -> None:
    """Free the engine's pools and graphs, so that the next engine finds memory."""
    built.core.suspend()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(run: Run, kind: str) -> None:
    """Check a small model, then measure a large one."""
    device = platform.device()
    if torch.cuda.is_available():
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        name = torch.cuda.get_device_name(device)
        run.remark(f"device: {name}, CUDA {torch.version.cuda}, compute capability {capability}")
    for dtype in PARITY:
        config = model_config(kind, small=True)
        small = loaded_model(build_model(config, device=device, dtype=dtype, seed=3), config)
        Checks(run, partial(roomy_engine, small, 8, 512), config.vocab_size or 0, dtype).all()
    work, start = QUICK if run.is_quick else WORK, time.perf_counter()

    def speed() -> None:
        loaded = filled_model(model_config(kind, small=run.is_quick), getattr(torch, work.dtype), device)
        synchronize()
        size = sum(one.numel() for one in loaded.model.parameters()) / 1e9
        run.row("model", {"made in s": time.perf_counter() - start, "billions of parameters": size})
        Speed(run, loaded, work).measure()

    run.attempt("speed", speed)


@case("gpu", reserved=50.0, needs_cuda=True)
def mamba2(run: Run) -> None:
    """Mamba-2 hybrid: checks in fp32; decode, idle share, phases and first tokens of 2 billion parameters."""
    measure(run, "mamba2")


@case("gpu", reserved=50.0, needs_cuda=True)
def gated_delta_net(run: Run) -> None:
    """Hybrid of gated delta nets: as mamba2."""
    measure(run, "gated_delta_net")


@case("gpu", reserved=50.0, needs_cuda=True)
def mamba1(run: Run) -> None:
    """Mamba-1 hybrid: as mamba2."""
    measure(run, "mamba1")
