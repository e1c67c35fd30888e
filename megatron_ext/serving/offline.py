"""A whole run without a server: load, submit the prompts, report. The work of `tools/run_inference.py`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from megatron_ext.config import CacheConfig, InferenceSettings
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.load import LoadedModel, load_model, save_model
from megatron_ext.scheduling.record import Status
from megatron_ext.serving.comparison import comparable, compare, print_comparison, problems
from megatron_ext.serving.machine import check_machine
from megatron_ext.serving.prompts import Prompt, check_tokens, read_prompts
from megatron_ext.serving.report import make_console, print_geometry, print_report, progress_bar
from megatron_ext.serving.results import build_results, check_output_path, write_results
from megatron_ext.serving.submission import Pass, check_schedule, run_passes


def run_offline(settings: InferenceSettings) -> bool:
    """Check everything that can be checked, load, run, report.

    Returns:
        Whether every request completed; with `--prefix-cache-compare` whether the cache changes nothing.

    Raises:
        ConfigError: For a mistake of the user's; no request has run then.
    """
    check_machine(settings.parallel)
    prompts = read_prompts(settings.run, settings.sampling)
    check_schedule(settings.run, len(prompts))
    if settings.run.output_path is not None:
        check_output_path(settings.run.output_path)
    platform.initialize(backend=settings.parallel.distributed_backend)
    try:
        return _compare(settings, prompts) if settings.run.prefix_cache_compare else _run(settings, prompts)
    finally:
        platform.shut_down()


def _run(settings: InferenceSettings, prompts: Sequence[Prompt]) -> bool:
    """Run the prompts; rank 0 prints and writes. Whether every request completed."""
    run = settings.run
    loaded = _load(settings, prompts)
    engine = _build_engine(settings, loaded, settings.cache)
    console = make_console(quiet=not _is_writer())
    print_geometry(engine.geometry, loaded.name, console, engine.longest_request_state_bytes)
    with progress_bar(len(prompts) * run.inference_repeat_n) as show:
        passes = run_passes(engine, prompts, run, show)
    print_report(passes, console)
    _write(settings, engine, passes, loaded.name)
    return all(record.status is Status.COMPLETED for one in passes for record in one.records)


def _compare(settings: InferenceSettings, prompts: Sequence[Prompt]) -> bool:
    """Run the prompts with the cache off, then on. Whether the cache skipped something and changed nothing."""
    run = settings.run
    prompts = comparable(prompts)
    loaded = _load(settings, prompts)
    console = make_console(quiet=not _is_writer())
    results = []
    with progress_bar(2 * len(prompts) * run.inference_repeat_n) as show:
        for is_on in (False, True):
            engine = _build_engine(settings, loaded, replace(settings.cache, enable_prefix_caching=is_on))
            base = len(results) * len(prompts) * run.inference_repeat_n
            passes = run_passes(engine, prompts, run, lambda done, base=base: show(base + done))
            results.append([record for one in passes for record in one.records])
            if not is_on:
                engine.suspend()  # the pools of both runs need not fit at the same time
    differences = compare(*results)
    found = problems(differences, loaded.dtype)
    print_comparison(differences, found, console)
    _write(settings, engine, passes, loaded.name)
    return not found


def _load(settings: InferenceSettings, prompts: Sequence[Prompt]) -> LoadedModel:
    loaded = load_model(settings.source, dict(settings.model_overrides))
    check_tokens(prompts, loaded.tokenizer, loaded.config.vocab_size)
    if settings.source.save is not None:
        save_model(settings.source.save, loaded)
    return loaded


def _build_engine(settings: InferenceSettings, loaded: LoadedModel, cache: CacheConfig) -> InferenceEngine:
    return build_engine(
        loaded.model,
        loaded.config,
        loaded.tokenizer,
        settings.batching,
        cache,
        dtype=loaded.dtype,
        seed=settings.source.seed,
        logging_step_interval=settings.run.inference_logging_step_interval,
    )


def _is_writer() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _write(settings: InferenceSettings, engine: InferenceEngine, passes: Sequence[Pass], model: str) -> None:
    run = settings.run
    if _is_writer() and run.output_path is not None:
        write_results(
            run.output_path, build_results(engine, passes, model=model, with_events=run.output_request_events)
        )
