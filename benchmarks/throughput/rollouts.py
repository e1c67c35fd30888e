"""Reinforcement learning: prompt tokens that rollouts skip, and what an update of the weights costs."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.cases import Figure, Run, case, token_ids
from benchmarks.models import OFF, engine, random_model, shaped
from benchmarks.peers.sizes import SIZES
from examples.embedded_model.training_model import cpu_layers, training_model
from megatron_ext import LoadedEngine, attach_engine, load_engine
from megatron_ext.config import CacheConfig, RequestParams, SourceConfig
from megatron_ext.mcore import platform
from megatron_ext.memory.heap import give_back_freed_memory
from megatron_ext.models.load import LoadedModel, load_model
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request_inputs import RequestInputs

MIB = 1024**2
BUCKET = 64 * MIB
POOLS = {"inference_dynamic_batching_buffer_size_gb": 0.25, "inference_dynamic_batching_max_requests": 4}
SYSTEM, QUESTION, BLOCK = 172, 128, 64  # tokens; 300 in all, so that the last block of a prompt is partial
ON = CacheConfig(snapshot_slots=64)
FIRST_STEP = RequestParams(1, ignore_eos=True)
SAMPLED = {"temperature": 1.0, "ignore_eos": True}
KINDS = {"one call": (ON, True), "a call each": (ON, False), "cache off": (OFF, False)}


# Rollouts


@case("throughput", quick={"rounds": 1, "groups": (2,), "generated": 2})
def rollouts(run: Run, rounds: int = 2, groups: tuple = (8, 16), prompts: int = 2, generated: int = 16) -> None:
    """Groups of samples in one call, in a call each, and without the cache: skipped tokens, and CPU time over that."""
    platform.initialize()
    loaded = load_model(SourceConfig(), {})
    for group in groups:
        spent: dict[str, list[float]] = {name: [] for name in KINDS}
        skipped = {}
        for number in range(rounds + 1):  # the first one warms up
            for name in KINDS:
                began = time.process_time()
                records = _rollout(loaded, name, group, prompts, generated, number)
                spent[name].append(time.process_time() - began)
                all_tokens = sum(record.prompt_token_count for record in records)
                skipped[name] = sum(record.skipped_prefill_token_count for record in records) / all_tokens
        base = statistics.median(spent["cache off"][1:])
        for name in KINDS:
            figures = {"skipped, %": 100 * skipped[name], "CPU / cache off": statistics.median(spent[name][1:]) / base}
            run.row(f"{prompts} groups of {group}, {name}", figures)


def _rollout(
    loaded: LoadedModel, kind: str, group: int, prompts: int, generated: int, number: int
) -> list[RequestRecord]:
    """Answer each prompt several times, with an empty cache."""
    cache, is_grouped = KINDS[kind]
    count = prompts * group
    built = engine(loaded, cache, block_count=24 * count, block_size=BLOCK, max_requests=count, max_tokens=4096)
    names = itertools.count()
    for index in range(prompts):
        prompt = (*token_ids(SYSTEM, "system"), *token_ids(QUESTION, f"question {number} {index}"))
        for _ in range(group):
            name = next(names)
            params = RequestParams(generated, seed=name, **SAMPLED)
            built.core.add(name, RequestInputs(prompt, params), group=index if is_grouped else None)
    return built.drain()


# Updates


@case("throughput", quick={"rounds": 1, "size": "5m"})
def weight_updates(run: Run, rounds: int = 3, size: str = "250m", packs: bool = True) -> None:
    """Routes by which new weights reach an engine, with the first step after: time, and memory besides both models."""
    torch.manual_seed(0)
    config = shaped(SIZES[size].shape)
    new = random_model(config, seed=1)
    weights = dict(new.model.named_parameters())
    total = sum(one.nbytes for one in weights.values())
    run.remark(f"{sum(one.numel() for one in weights.values()) / 1e6:.0f} M parameters, {total / MIB:.0f} MiB in fp32")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        save_dist_checkpoint(directory, new.model, config)
        settings = {"load": str(directory), "tokenizer_type": "NullTokenizer", "vocab_size": config.vocab_size}
        with load_engine(**settings, **POOLS, pack_weights=packs) as loaded:
            for name, update in _routes(loaded, weights, directory).items():
                run.row(name, _cost(loaded, update, rounds, total))
    with cpu_layers(), attach_engine(training_model(new), None, **POOLS) as attached:
        run.row("attached: weights_changed()", _cost(attached, attached.weights_changed, rounds, total))


def _routes(loaded: LoadedEngine, weights: dict[str, torch.Tensor], directory: Path) -> dict[str, Callable[[], None]]:
    return {
        "no update": lambda: None,
        "named tensors": lambda: loaded.update_weights(weights),
        f"named tensors, buckets of {BUCKET // MIB} MiB": lambda: _in_buckets(loaded, weights),
        "named tensors, keep_old": lambda: loaded.update_weights(weights, keep_old=True),
        "checkpoint directory": lambda: _from_directory(loaded, directory),
    }


def _in_buckets(loaded: LoadedEngine, weights: dict[str, torch.Tensor]) -> None:
    bucket: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if bucket and sum(one.nbytes for one in (*bucket.values(), tensor)) > BUCKET:
            loaded.update_weights(bucket, partial=True)
            bucket = {}
        bucket[name] = tensor
    loaded.update_weights(bucket, partial=True)


def _from_directory(loaded: LoadedEngine, directory: Path) -> None:
    """Do what the server's route does: read a second copy, write it between two steps, empty the cache."""
    loaded.change_weights(loaded.weight_writer.read_checkpoint(directory)).result()


def _cost(engine: LoadedEngine, update: Callable[[], None], rounds: int, total: int) -> dict[str, Figure]:
    """Return medians of times, and the largest memory that an update and its first step took; a first round apart."""
    cpu, wall, extra = [], [], []
    for _ in range(rounds + 1):
        give_back_freed_memory()
        began, start = time.process_time(), time.perf_counter()
        with _peak() as peak:
            update()
            engine.generate([[1, 2, 3]], FIRST_STEP)
        cpu.append(time.process_time() - began)
        wall.append(time.perf_counter() - start)
        extra.append(peak[0])
    return {
        "CPU, s": statistics.median(cpu[1:]),
        "wall, s": statistics.median(wall[1:]),
        "extra memory, MiB": max(extra[1:]) / MIB,
        "over the weights": max(extra[1:]) / total,
        "the first time, MiB": extra[0] / MIB,
    }


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Sample this process's own memory; the list has one number afterwards: bytes at most above the start."""
    begin, stop, found = _own_bytes(), threading.Event(), [0]

    def sample() -> None:
        while not stop.wait(0.002):
            found[0] = max(found[0], _own_bytes() - begin)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def _own_bytes() -> int:
    """Return the bytes of anonymous memory; pages of files that are mapped belong to the system's cache."""
    status = Path("/proc/self/status").read_text("ascii")
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
