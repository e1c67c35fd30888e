"""Worker for this engine. Run by `benchmarks.bench`; see `benchmarks.peers.work`.

Beside the workloads it measures references of its own: the time that the matrix products alone would take (the
floor), and prompts with nothing in common with the cache on and off.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator

import torch

from benchmarks.measuring import matmul_rate
from benchmarks.nemotron_shaped import forward_flops
from benchmarks.peers.work import OWN, QUICK, Size, arguments, run, serve, unique
from megatron_ext.config import BatchingConfig, CacheConfig, RequestParams, SourceConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.load import LoadedModel, load_model

BLOCKS, SLOTS, REQUESTS = 1_600, 64, 16
ON, OFF = CacheConfig(snapshot_slots=SLOTS), CacheConfig(enable_prefix_caching=False)


class Ours:
    """An engine with default settings beside room for all."""

    def __init__(self, loaded: LoadedModel, cache: CacheConfig = ON) -> None:
        batching = BatchingConfig(block_count=BLOCKS, max_requests=REQUESTS)
        one = loaded
        self._engine = build_engine(one.model, one.config, one.tokenizer, batching, cache, dtype=one.dtype)
        self._reported: dict[int, int] = {}
        self.rates: list[float] = []  # of matrix products, operations a second

    def forget(self) -> None:
        """See `Peer`; between two workloads, so that the machine's rate is measured here, too."""
        self._engine.reset_prefix_cache()
        self.rates.append(matmul_rate(torch.float32, torch.device("cpu")))

    def submit(self, key: int, prompt: list[int], count: int) -> None:
        """See `Peer`."""
        self._engine.add_request(key, prompt, RequestParams(count, ignore_eos=True))
        self._reported[key] = 0

    def step(self) -> Iterator[tuple[int, list[int], int, bool]]:
        """See `Peer`."""
        ended = {one.request_id: one for one in self._engine.step_modern()["finished_request_records"]}
        for key, seen in list(self._reported.items()):
            record = ended.get(key)
            tokens = list((record or self._engine.get_request(key)).generated_tokens)
            if len(tokens) == seen and record is None:
                continue
            self._reported[key] = len(tokens)
            if record is not None:
                del self._reported[key]
            yield key, tokens[seen:], record.skipped_prefill_token_count if record else 0, record is not None


def floors(loaded: LoadedModel, rate: float, size: Size) -> dict[str, dict[str, float]]:
    """Seconds of the matrix products of a prompt: of all of it, and of what is its own."""
    return {
        str(prefix): {
            "cold": forward_flops(loaded, [prefix + OWN]) / rate,
            "warm": forward_flops(loaded, [prefix + OWN], skipped=prefix) / rate,
        }
        for prefix in size.prefixes
    }


def on_over_off(loaded: LoadedModel, size: Size) -> float:
    """Tokens a second with the cache on over off, where no two prompts share anything: the median of pairs of runs."""
    peers = {"on": Ours(loaded, ON), "off": Ours(loaded, OFF)}
    ratios = []
    for pair in range(2 * size.repeats + 1):
        seconds = {}
        for name in ("on", "off") if pair % 2 else ("off", "on"):
            peers[name].forget()
            _, seconds[name] = serve(peers[name], unique(size.unique, min(8, size.requests)), 8)
        if pair:  # the first one warms up
            ratios.append(seconds["off"] / seconds["on"])
    return statistics.median(ratios)


def main() -> None:
    """Measure, and write it down."""
    options = arguments()
    torch.set_num_threads(options.threads)
    size = QUICK if options.quick else Size()
    loaded = load_model(SourceConfig(load_hf=options.model), {}, device=torch.device("cpu"))
    peer = Ours(loaded)
    result = run(peer, options, peer="ours", torch=torch.__version__)
    rate = statistics.median(peer.rates)
    print(f"  matrix products: {rate / 1e9:.0f} GFLOP/s ({min(peer.rates) / 1e9:.0f} to {max(peer.rates) / 1e9:.0f})")
    result |= {"floor": floors(loaded, rate, size), "rates": peer.rates}
    result["unique, cache on / off"] = on_over_off(loaded, size)
    print(f"  ours: unique prompts, cache on / off {result['unique, cache on / off']:.3f}", flush=True)
    options.figures.write_text(json.dumps(result, indent=1), "utf-8")
    platform.shut_down()


if __name__ == "__main__":
    main()
