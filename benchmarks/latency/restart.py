"""The cache on disk: the first request after a restart, bytes to and from the medium, digests of weights."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.cases import Run, case, token_ids
from benchmarks.measuring import timed
from benchmarks.models import Engine, nemotron_h, pair_of
from benchmarks.peers.sizes import SIZES
from megatron_ext.config import BatchingConfig, CacheConfig, RequestParams, SourceConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.mcore.warm_restart_setup import open_disk_cache
from megatron_ext.models.identity import cache_facts, weights_digest
from megatron_ext.models.load import LoadedModel, load_model
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind, NewEntry
from megatron_ext.prefix_cache.disk.store import DiskStore, open_directory_store
from megatron_ext.prefix_cache.hash_chain import BlockHash, hash_blocks

MIB, GIB = 1024**2, 1024**3
OWN = 64  # tokens of each prompt after the system prompt
ONE = RequestParams(1, ignore_eos=True)
IDENTITY, ROOT = bytes(32), b"r" * 32


def embedded() -> LoadedModel:
    """Load the model of the package."""
    platform.initialize()
    return load_model(SourceConfig(), {})


def quarter_billion() -> LoadedModel:
    """Build the model of 0.25 billion parameters with random weights."""
    torch.manual_seed(0)
    return pair_of(nemotron_h(SIZES["250m"].shape)).ours


MODELS: dict[str, Callable[[], LoadedModel]] = {"5m": embedded, "250m": quarter_billion}


def started(loaded: LoadedModel, weights: bytes, directory: Path) -> InferenceEngine:
    """Build an engine whose cache is kept in a directory."""
    cache = CacheConfig(prefix_cache_dir=str(directory), prefix_cache_disk_gb=2.0, prefix_cache_drain_seconds=60.0)
    settings = BatchingConfig(buffer_size_gb=0.6, max_requests=4)
    built = build_engine(loaded.model, loaded.config, loaded.tokenizer, settings, cache, dtype=loaded.dtype)
    open_disk_cache(built, cache_facts(loaded, weights), cache)
    return built


def first_token(engine: InferenceEngine, prompt: Sequence[int]) -> tuple[float, float, int]:
    """Return CPU seconds and wall seconds until the first token, and skipped tokens."""
    began = time.process_time()
    (record,) = Engine(engine.core).generate([prompt], ONE)
    assert record.ttft is not None, "it has a token"
    return time.process_time() - began, record.ttft, record.skipped_prefill_token_count


@case("latency", quick={"rounds": 1, "system": 256, "sizes": ("5m",)})
def restart(run: Run, rounds: int = 3, system: int = 2000, sizes: tuple = ("5m", "250m")) -> None:
    """First token after a system prompt: cold, again before the stop, and first of all after the restart."""
    for size in sizes:
        loaded = MODELS[size]()
        assert loaded.config.vocab_size is not None, "every model has one"
        weights, found = weights_digest(loaded.model), {"cold": [], "before the stop": [], "after the restart": []}
        ends, starts, stored, skips = [], [], 0, {}
        for number in range(rounds + 1):  # the first one warms up
            with tempfile.TemporaryDirectory() as folder:
                limit = min(4096, loaded.config.vocab_size) - 1
                prefix, *own = (
                    [token % limit + 1 for token in token_ids(count, f"{size} {number} {count} {place}")]
                    for place, count in enumerate((system, OWN, OWN, OWN, OWN))
                )
                engine = started(loaded, weights, Path(folder) / "cache")
                times = {"cold": first_token(engine, [*prefix, *own[0]])}
                first_token(engine, [*prefix, *own[1]])
                times["before the stop"] = first_token(engine, [*prefix, *own[2]])
                ends.append(timed(engine.close))
                stored = engine.core.disk.counts()["bytes"]
                starts.append(time.perf_counter())
                engine = started(loaded, weights, Path(folder) / "cache")
                starts[-1] = time.perf_counter() - starts[-1]
                times["after the restart"] = first_token(engine, [*prefix, *own[3]])
                engine.core.disk.abandon()
            if number:
                for name, one in times.items():
                    found[name].append(one[:2])
                    skips[name] = one[2]
        cold = [statistics.median(one[place] for one in found["cold"]) for place in (0, 1)]
        for name, measured in found.items():
            cpu, wall = (statistics.median(one[place] for one in measured) for place in (0, 1))
            figures = {"skipped": skips[name], "CPU, ms": 1000 * cpu, "wall, ms": 1000 * wall}
            run.row(f"{size}, {name}", figures | {"CPU / cold": cpu / cold[0], "wall / cold": wall / cold[1]})
        run.row(
            f"{size}, stop and start",
            {"MiB": stored / MIB, "stop, s": statistics.median(ends[1:]), "start, s": statistics.median(starts[1:])},
        )


@contextmanager
def raw_file(path: Path) -> Iterator[int]:
    """Open a file for reading and writing."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


def drop_pages(path: Path) -> None:
    """Drop a file's pages from memory, so that it is read from the device."""
    with raw_file(path) as handle:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def write_raw(handle: int, content: bytes, count: int) -> None:
    """Write `count` pieces to a file, and wait for the device."""
    for place in range(count):
        os.pwrite(handle, content, place * len(content))
    os.fdatasync(handle)


def read_raw(handle: int, buffer: bytearray, count: int) -> None:
    """Read `count` pieces of a file."""
    for place in range(count):
        os.preadv(handle, [buffer], place * len(buffer))


def write_entries(store: DiskStore, hashes: Sequence[BlockHash], content: bytes) -> None:
    """Write an entry for each hash, and wait for the device, as the store does not."""
    for place, block_hash in enumerate(hashes):
        key = EntryKey(EntryKind.BLOCK, block_hash)
        parent = hashes[place - 1] if place else ROOT
        store.put(NewEntry(key, parent, place + 1, [place], used=float(place)), [content])
    store.commit()
    os.sync()


def read_entries(store: DiskStore, hashes: Sequence[BlockHash], buffer: bytearray) -> None:
    """Read the entry of each hash."""
    for block_hash in hashes:
        store.read(EntryKey(EntryKind.BLOCK, block_hash), [buffer])


def transfers(folder: Path, size: int, count: int) -> dict[str, float]:
    """Return the seconds to write and read `count` entries of a size, and a raw file of the same bytes."""
    content, buffer = os.urandom(size), bytearray(size)
    hashes = hash_blocks(ROOT, list(range(count)), 1)
    found = {}
    with raw_file(folder / "raw") as raw:
        found["raw write"] = timed(lambda: write_raw(raw, content, count))
        store = open_directory_store(folder / "cache", IDENTITY, 2 * GIB)
        began = time.thread_time()
        found["write"] = timed(lambda: write_entries(store, hashes, content))
        found["CPU, write"] = time.thread_time() - began
        drop_pages(folder / "raw")
        for path in (folder / "cache" / "slot-0").glob("*.kv"):
            drop_pages(path)
        found["raw read"] = timed(lambda: read_raw(raw, buffer, count))
        began = time.thread_time()
        found["read"] = timed(lambda: read_entries(store, hashes, buffer))
        found["CPU, read"] = time.thread_time() - began
        store.close()
    return found


@case("latency", quick={"rounds": 1, "total_mib": 4, "sizes": (65_536,)})
def disk_bandwidth(
    run: Run, rounds: int = 3, total_mib: int = 256, sizes: tuple = (65_536, 524_288, 16_777_216)
) -> None:
    """Bytes a second to and from the store of entries beside a raw file, in turns; reads find no page in memory."""
    for size in sizes:
        count, turns = max(1, total_mib * MIB // size), []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                turns.append(transfers(Path(folder), size, count))
        rates = {name: count * size / statistics.median(one[name] for one in turns) / MIB for name in turns[0]}
        ratios = {f"{name} / raw": rates[name] / rates[f"raw {name}"] for name in ("write", "read")}
        run.row(f"{size // 1024:,} KiB", {f"{name}, MiB/s": rate for name, rate in rates.items()} | ratios)
