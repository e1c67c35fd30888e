"""What caching gives: time to first token of warm prompts, and what it costs where nothing repeats.

Run: `python -m benchmarks.prefix_caching`. An attention-only model; everything is measured in one run, and only
its figures are to be compared.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import header, synchronize
from megatron_ext.config import BatchingConfig, CacheConfig, ModelConfig, RequestParams
from megatron_ext.mcore import platform
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.mcore.engine import InferenceEngine
from megatron_ext.models.build import build_model
from megatron_ext.models.tokenizer import NullTokenizer

SHAPE = ModelConfig(
    hybrid_override_pattern="*-" * 4,
    hidden_size=256,
    ffn_hidden_size=1024,
    num_attention_heads=8,
    num_query_groups=2,
    squared_relu=True,
    max_position_embeddings=16_384,
    vocab_size=4096,
)
OWN = 128  # tokens of each prompt that nobody shares


class Bench:
    """One model, fresh engines, fresh prompts."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.model = build_model(SHAPE)
        self._seed = 0

    def engine(self, *, is_on: bool) -> InferenceEngine:
        """An engine with room for every prompt of a measurement in one step."""
        batching = BatchingConfig(block_count=2000, block_size=64, max_requests=16, max_tokens=80_000)
        cache = CacheConfig(enable_prefix_caching=is_on)
        return build_engine(self.model, SHAPE, NullTokenizer(SHAPE.vocab_size), batching, cache, dtype=torch.float32)

    def tokens(self, count: int) -> list[int]:
        """Token ids that no other call gives."""
        self._seed += 1
        return torch.randint(4096, (count,), generator=torch.Generator().manual_seed(self._seed)).tolist()

    def ttft(self, shared: int, own: int, requests: int, *, warm: bool) -> float:
        """Median over repeats of the largest time to first token of `requests` prompts submitted at once."""
        return statistics.median(self._ttft(shared, own, requests, warm=warm) for _ in range(self.repeats))

    def _ttft(self, shared: int, own: int, requests: int, *, warm: bool) -> float:
        engine = self.engine(is_on=warm)
        prefix = self.tokens(shared) if shared else []
        if warm:
            engine.generate([[*prefix, *self.tokens(own)]], RequestParams(num_tokens_to_generate=1))
        prompts = [[*prefix, *self.tokens(own)] for _ in range(requests)]
        records = engine.generate(prompts, RequestParams(num_tokens_to_generate=1))
        expected = shared // 64 * 64 if warm else 0
        if any(record.skipped_prefill_token_count != expected for record in records):
            raise RuntimeError("a prompt did not skip what it should: the figures would mean something else")
        return max(record.ttft for record in records)

    def unique_throughput_ratio(self) -> float:
        """Prompt tokens a second with the cache on over off, where no two prompts share anything."""
        ratios = []
        for _ in range(self.repeats):
            prompts = [self.tokens(512) for _ in range(8)]
            durations = {}
            for is_on in (True, False):
                engine = self.engine(is_on=is_on)
                start = time.perf_counter()
                engine.generate(prompts, RequestParams(num_tokens_to_generate=8))
                synchronize()
                durations[is_on] = time.perf_counter() - start
            ratios.append(durations[False] / durations[True])
        return statistics.median(ratios)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console(highlight=False)
    bench = Bench(arguments.repeats)
    console.print(header(platform.device(), torch.float32), markup=False)
    bench.ttft(0, OWN, 1, warm=False)  # warms up
    console.print(ttft_table(bench))
    console.print(f"all prompts unique: throughput with the cache on / off {bench.unique_throughput_ratio():.3f}")
    platform.shut_down()


def ttft_table(bench: Bench) -> Table:
    """Seconds to first token."""
    table = Table("shared", "at once", "cold, s", "warm, s", f"just {OWN} tokens, s", "cold / warm", "warm / just own")
    for requests in (1, 8):
        alone = bench.ttft(0, OWN, requests, warm=False)
        for shared in (2048, 8192):
            cold = bench.ttft(shared, OWN, requests, warm=False)
            warm = bench.ttft(shared, OWN, requests, warm=True)
            seconds = (f"{value:.3f}" for value in (cold, warm, alone))
            table.add_row(str(shared), str(requests), *seconds, f"{cold / warm:.1f}", f"{warm / alone:.2f}")
    return table


if __name__ == "__main__":
    main()
