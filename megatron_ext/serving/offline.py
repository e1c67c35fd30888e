"""A whole run without a server: load, submit the prompts, report. The work of `tools/run_inference.py`."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from megatron_ext.config import InferenceSettings, ParallelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.load import load_model, save_model
from megatron_ext.scheduling.record import Status
from megatron_ext.serving.prompts import Prompt, check_tokens, read_prompts
from megatron_ext.serving.report import make_console, print_geometry, print_report, progress_bar
from megatron_ext.serving.results import build_results, check_output_path, write_results
from megatron_ext.serving.submission import Pass, check_schedule, run_passes


def run_offline(settings: InferenceSettings) -> bool:
    """Check everything that can be checked, load, run, report.

    Returns:
        Whether every request completed.

    Raises:
        ConfigError: For a mistake of the user's; no request has run then.
    """
    _check_machine(settings.parallel)
    prompts = read_prompts(settings.run, settings.sampling)
    check_schedule(settings.run, len(prompts))
    if settings.run.output_path is not None:
        check_output_path(settings.run.output_path)
    platform.initialize(backend=settings.parallel.distributed_backend)
    try:
        passes = _run(settings, prompts)
    finally:
        platform.shut_down()
    return all(record.status is Status.COMPLETED for one in passes for record in one.records)


def _check_machine(parallel: ParallelConfig) -> None:
    """See that the processes and the device are there that the settings speak of."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise ConfigError(f"started on {ranks} ranks, and this version runs on one; give torchrun --nproc-per-node 1")
    if parallel.distributed_backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("--distributed-backend nccl needs CUDA, which this machine does not have; gloo would do")


def _run(settings: InferenceSettings, prompts: Sequence[Prompt]) -> list[Pass]:
    """Load the model and run the prompts; rank 0 prints and writes."""
    source, run = settings.source, settings.run
    loaded = load_model(source, dict(settings.model_overrides))
    check_tokens(prompts, loaded.tokenizer, loaded.config.vocab_size)
    if source.save is not None:
        save_model(source.save, loaded)
    engine = build_engine(
        loaded.model,
        loaded.config,
        loaded.tokenizer,
        settings.batching,
        dtype=loaded.dtype,
        seed=source.seed,
        logging_step_interval=run.inference_logging_step_interval,
    )
    is_writer = os.environ.get("RANK", "0") == "0"
    console = make_console(quiet=not is_writer)
    print_geometry(engine.geometry, loaded.name, console)
    with progress_bar(len(prompts) * run.inference_repeat_n) as show:
        passes = run_passes(engine, prompts, run, show)
    print_report(passes, console)
    if is_writer and run.output_path is not None:
        results = build_results(engine, passes, model=loaded.name, with_events=run.output_request_events)
        write_results(run.output_path, results)
    return passes
