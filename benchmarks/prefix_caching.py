"""Gain of prefix caching for a hybrid model, beside transformers with a copied cache, and cost without repetition.

Run: `python -m benchmarks.prefix_caching`. Everything is measured in one run, and only its figures are to be compared.
The copied cache is the best that a script can do: it is told where the prefix ends. The floor is the time that the
matrix products of what must be computed would take at the rate measured in the run.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from benchmarks.measuring import header, matmul_rate, synchronize
from benchmarks.nemotron_shaped import VOCABULARY, Pair, build_pair, forward_flops
from megatron_ext.config import CacheConfig, RequestParams
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.scheduling.record import RequestRecord

BLOCK, SLOTS = 64, 64
OWN = 128  # tokens of each prompt that are not shared
SHARED = (2048, 8192)
AT_ONCE = (1, 8)
CHATS, TURNS, SAID, ANSWER = 8, 4, 200, 64
SIGHTING_OWN, SIGHTING_SLOTS = 512, {2048: 40, 8192: 64}  # free when the first of them comes
UNIQUE = ((512, 8), (2048, 4), (8192, 1))  # tokens of a prompt that shares nothing, and how many at once
ON, OFF = CacheConfig(snapshot_slots=SLOTS), CacheConfig(enable_prefix_caching=False)
ASKED = CacheConfig(snapshot_slots=SLOTS, provisional_slots=0)  # no opportunistic checkpoints
ALIGN = CacheConfig(snapshot_slots=SLOTS, snapshot_mode="align")
STEP = 2048  # tokens of a step where modes are compared: prompts are cut in either


class Bench:
    """Model shared by two engines, with prompts that never repeat."""

    def __init__(self, pair: Pair, rate: float, repeats: int) -> None:
        self.pair = pair
        self.rate = rate
        self.repeats = repeats
        self._seed = 0

    def engine(self, cache: CacheConfig, max_tokens: int = 80_000) -> InferenceEngine:
        """An engine with room for every prompt of a measurement, in one step unless told otherwise."""
        return self.pair.engine(cache, block_count=1600, block_size=BLOCK, max_requests=16, max_tokens=max_tokens)

    def tokens(self, count: int) -> list[int]:
        """Token ids that no other call gives."""
        self._seed += 1
        return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(self._seed)).tolist()

    def prompts(self, prefix: Sequence[int], own: int, count: int) -> list[list[int]]:
        """Prompts with a common prefix and different continuations."""
        return [[*prefix, *self.tokens(own)] for _ in range(count)]

    def median(self, measure: Callable[[], float]) -> float:
        """Median of as many runs as requested."""
        return statistics.median(measure() for _ in range(self.repeats))

    def cold(self, shared: int, count: int) -> float:
        """Seconds to the last first token of prompts that share nothing with what came before, caching off."""
        prefix = self.tokens(shared)
        return slowest(serve(self.engine(OFF), self.prompts(prefix, OWN, count)))

    def warm(self, shared: int, count: int) -> float:
        """Seconds of the same requests with caching on, after the prefix was seen twice."""
        engine = self.engine(ON)
        prefix = self.tokens(shared)
        for prompt in self.prompts(prefix, OWN, 2):
            serve(engine, [prompt])
        records = serve(engine, self.prompts(prefix, OWN, count))
        if any(record.skipped_prefill_token_count != shared for record in records):
            raise RuntimeError("a prompt did not skip its prefix: the figures would mean something else")
        return slowest(records)

    @torch.inference_mode()
    def copied(self, shared: int, count: int) -> float:
        """Seconds that transformers takes for the prompts' own tokens and for copying the cache of the prefix."""
        device = platform.device()
        prefix = torch.tensor([self.tokens(shared)], device=device)
        own = torch.tensor(self.prompts([], OWN, count), device=device)
        kept = self.pair.reference(prefix, use_cache=True, logits_to_keep=1).past_key_values
        synchronize()
        start = time.perf_counter()
        cache = copy.deepcopy(kept)
        if count > 1:
            repeat_cache(cache, count)
        logits = self.pair.reference(own, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        logits[:, -1].argmax(-1).tolist()
        return time.perf_counter() - start

    def floor(self, shared: int, count: int, *, warm: bool) -> float:
        """Seconds of the matrix products that cannot be skipped."""
        flops = forward_flops(self.pair.ours, [shared + OWN] * count, skipped=shared if warm else 0)
        return flops / self.rate

    def in_mode(self, cache: CacheConfig, shared: int, count: int) -> tuple[float, float]:
        """Seconds to the last first token in steps of `STEP` tokens: prompts never seen before, and warm ones."""
        engine = self.engine(cache, STEP)
        cold = slowest(serve(engine, [self.tokens(shared + OWN) for _ in range(count)]))
        prefix = self.tokens(shared)
        for prompt in self.prompts(prefix, OWN, 2):
            serve(engine, [prompt])
        return cold, slowest(serve(engine, self.prompts(prefix, OWN, count)))

    def unique_ratio(self) -> float:
        """Prompt tokens a second with the cache on over off, where no two prompts share anything."""
        prompts = self.prompts([], 512, 8)
        durations = {}
        for cache in (ON, OFF):
            engine = self.engine(cache)
            start = time.perf_counter()
            serve(engine, prompts, 8)
            durations[cache] = time.perf_counter() - start
        return durations[OFF] / durations[ON]

    def guess_ratio(self, length: int, count: int) -> float:
        """Ratio of prompt tokens a second with opportunistic checkpoints to those without; no two prompts are alike.

        The modes take turns (on, off, off, on), so that neither has the better half of the machine's time.

        One mode after the other and back, so that neither has the better half of the machine's time.
        """
        seconds = dict.fromkeys((ON, ASKED), 0.0)
        for cache in (ON, ASKED, ASKED, ON):
            engine, prompts = self.engine(cache), self.prompts([], length, count)
            start = time.perf_counter()
            serve(engine, prompts)
            seconds[cache] += time.perf_counter() - start
            taken = engine.prefix_cache_statistics()["provisional_taken"]
            if (taken > 0) != (cache is ON):
                raise RuntimeError(f"{taken} snapshots that nobody asked for: the figures would mean something else")
        return seconds[ASKED] / seconds[ON]

    def chat_tokens(self) -> tuple[int, int]:
        """Prompt tokens computed in all conversations and turns, and the fewest possible with whole blocks."""
        engine = self.engine(ON)
        histories: list[list[int]] = [[] for _ in range(CHATS)]
        computed = fewest = 0
        for _ in range(TURNS):
            known = [max(0, len(history) - 1) // BLOCK * BLOCK for history in histories]  # the last token has no state
            prompts = [[*history, *self.tokens(SAID)] for history in histories]
            records = serve(engine, prompts, ANSWER)
            computed += sum(record.computed_prefill_token_count for record in records)
            fewest += sum(len(prompt) - skip for prompt, skip in zip(prompts, known, strict=True))
            histories = [[*p, *record.generated_tokens] for p, record in zip(prompts, records, strict=True)]
        return computed, fewest

    def sightings(self, shared: int) -> list[RequestRecord]:
        """The first, second and third prompt that begins with the same tokens."""
        engine = self.engine(CacheConfig(snapshot_slots=SIGHTING_SLOTS[shared]))
        prefix = self.tokens(shared)
        return [serve(engine, [prompt])[0] for prompt in self.prompts(prefix, SIGHTING_OWN, 3)]


def repeat_cache(cache: DynamicCache, count: int) -> None:
    """Make a cache of one sequence one of `count` equal ones; transformers' own method knows attention layers only."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for states in (layer.conv_states, layer.recurrent_states):
                states.update(
                    {i: state.repeat_interleave(count, 0) for i, state in states.items() if state is not None}
                )
        elif layer.is_initialized:
            layer.batch_repeat_interleave(count)


def serve(engine: InferenceEngine, prompts: list[list[int]], count: int = 1) -> list[RequestRecord]:
    """All at once, to the end."""
    records = engine.generate(prompts, RequestParams(count))
    synchronize()
    return records


def slowest(records: Sequence[RequestRecord]) -> float:
    """The largest time to first token."""
    return max(record.ttft for record in records)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = platform.device()
    console = Console(highlight=False)
    pair = build_pair(device, torch.float32)
    rate = matmul_rate(torch.float32, device)
    bench = Bench(pair, rate, arguments.repeats)
    console.print(header(device, torch.float32), markup=False)
    console.print(f"matrix products: {rate / 1e9:.0f} GFLOP/s")
    bench.warm(BLOCK, 1)  # everything is there once
    console.print(ttft_table(bench))
    console.print(f"all prompts unique: throughput with the cache on / off {bench.median(bench.unique_ratio):.3f}")
    for length, count in UNIQUE:
        ratio = bench.median(lambda length=length, count=count: bench.guess_ratio(length, count))
        console.print(
            f"{count} unique prompts of {length}: throughput with provisional snapshots / without {ratio:.3f}"
        )
    computed, fewest = bench.chat_tokens()
    console.print(
        f"{CHATS} chats of {TURNS} turns: {computed} tokens computed, {fewest} at least ({computed / fewest:.3f})"
    )
    console.print(sightings_table(bench))
    console.print(modes_table(bench))
    platform.shut_down()


def ttft_table(bench: Bench) -> Table:
    """Seconds to first token."""
    table = Table("shared", "at once", "cold, s", "warm, s", "copied cache, s", "cold / floor", "warm / floor")
    table.add_column("warm over its floor / cold over its floor")
    table.add_column("warm / copied")
    for count in AT_ONCE:
        for shared in SHARED:
            cold = bench.median(lambda shared=shared, count=count: bench.cold(shared, count))
            warm = bench.median(lambda shared=shared, count=count: bench.warm(shared, count))
            copied = bench.median(lambda shared=shared, count=count: bench.copied(shared, count))
            over_floor = (cold / bench.floor(shared, count, warm=False), warm / bench.floor(shared, count, warm=True))
            ratios = (*over_floor, over_floor[1] / over_floor[0], warm / copied)
            times = (f"{value:.3f}" for value in (cold, warm, copied))
            table.add_row(str(shared), str(count), *times, *(f"{ratio:.2f}" for ratio in ratios))
    return table


def modes_table(bench: Bench) -> Table:
    """`align` beside `kernel`."""
    table = Table(
        "shared", "at once", "kernel cold, s", "align / kernel, cold", "kernel warm, s", "align / kernel, warm"
    )
    for count in AT_ONCE:
        for shared in SHARED:
            runs = [[bench.in_mode(cache, shared, count) for cache in (ON, ALIGN)] for _ in range(bench.repeats)]
            row = []
            for which in (0, 1):
                kernel, align = (statistics.median(run[mode][which] for run in runs) for mode in (0, 1))
                row += [f"{kernel:.3f}", f"{align / kernel:.2f}"]
            table.add_row(str(shared), str(count), *row)
    return table


def sightings_table(bench: Bench) -> Table:
    """Table of the tokens that the first requests after a shared prefix skip."""
    table = Table("shared", "sighting", "tokens skipped", "ttft, s")
    for shared in SHARED:
        for number, record in enumerate(bench.sightings(shared), start=1):
            table.add_row(str(shared), str(number), str(record.skipped_prefill_token_count), f"{record.ttft:.3f}")
    return table


if __name__ == "__main__":
    main()
