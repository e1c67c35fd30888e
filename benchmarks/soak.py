"""Thousands of mixed requests through pools that are far too small, every invariant checked after every step.

Run: `python -m benchmarks.soak --requests 3000`. Chats whose turns go on from their answers, shared prefixes, salted,
opted-out, sampled and aborted requests, resets of the cache. Afterwards some of the requests are replayed, each alone
in an engine without caching, and must give the same tokens. Exit code 1 if one does not.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.measuring import header
from megatron_ext.config import (
    BatchingConfig,
    CacheConfig,
    EvictionPolicyName,
    ModelConfig,
    RequestParams,
    SnapshotMode,
)
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.build import build_model
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.text.tokenizer import NullTokenizer

SHAPE = ModelConfig(
    hybrid_override_pattern="M*-M",
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    mamba_state_dim=16,
    mamba_head_dim=8,
    mamba_num_heads=8,
    mamba_num_groups=2,
    squared_relu=True,
    untie_embeddings_and_output_weights=True,  # else a random model repeats its input
    max_position_embeddings=512,
    vocab_size=64,
)
BLOCK = 16
POOLS = BatchingConfig(block_count=24, block_size=BLOCK, max_requests=8, max_tokens=48)
LONGEST_PROMPT = 150
MARGIN = 1e-4  # logits closer than this may be told apart either way (a difference of rounding, not of states)


@dataclass
class Traffic:
    """Source of prompts: a few texts with which many requests begin, and chats that continue earlier ones."""

    random: random.Random
    prefixes: list[list[int]] = field(init=False)
    chats: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefixes = [self._tokens(length) for length in (16, 33, 48, 64, 100)]

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(SHAPE.vocab_size) for _ in range(count)]

    def prompt(self) -> list[int]:
        """The next prompt: a chat's next turn, a known prefix with an own end, or something new."""
        draw = self.random.random()
        if self.chats and draw < 0.4:
            said = self.chats.pop(self.random.randrange(len(self.chats)))
            return said + self._tokens(self.random.randint(1, 20))
        if draw < 0.85:
            prefix = self.random.choice(self.prefixes)
            cut = self.random.choice([len(prefix), len(prefix), self.random.randint(1, len(prefix))])
            return prefix[:cut] + self._tokens(self.random.choice([0, 1, 2, 3, 15, 16, 17, self.random.randint(0, 40)]))
        return self._tokens(self.random.randint(1, 80))

    def params(self) -> RequestParams:
        """Random sampling parameters of a request."""
        sampled = self.random.random() < 0.2
        return RequestParams(
            num_tokens_to_generate=self.random.choice([1, 2, 8, 24, 40]),
            temperature=1.0 if sampled else 0.0,
            seed=self.random.randrange(1000) if sampled else None,
            cache_salt=self.random.choice([None, None, None, "a", "b"]),
            enable_prefix_caching=self.random.random() > 0.1,
            return_log_probs=self.random.random() < 0.2,
            skip_prompt_log_probs=self.random.random() < 0.5,
        )

    def finished(self, record: RequestRecord) -> None:
        """A conversation may go on from here."""
        said = [*record.prompt_tokens, *record.generated_tokens]
        if len(said) < LONGEST_PROMPT - 20 and self.random.random() < 0.7:
            self.chats.append(said)
            del self.chats[:-12]


def slow_model() -> torch.nn.Module:
    """Random weights whose states decay slowly, so that a wrong state shows in the text."""
    model = build_model(SHAPE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-4.0, -2.0)
            elif parameter.dim() == 2:
                parameter.mul_(4.0)
    return model


def new_engine(model: torch.nn.Module, cache: CacheConfig, batching: BatchingConfig = POOLS) -> InferenceEngine:
    """An engine of this size."""
    return build_engine(model, SHAPE, NullTokenizer(SHAPE.vocab_size), batching, cache, dtype=torch.float32)


def soak(engine: InferenceEngine, count: int, seed: int) -> tuple[list[tuple[RequestRecord, RequestParams]], Counter]:
    """Serve `count` requests; their records, and what was done to them."""
    source = random.Random(seed)
    traffic = Traffic(random.Random(seed + 1))
    living: dict[int, tuple[asyncio.Future[RequestRecord], RequestParams]] = {}
    done: list[tuple[RequestRecord, RequestParams]] = []
    deeds: Counter = Counter()
    submitted = 0
    with tqdm(total=count, unit="request", disable=None) as bar:
        while len(done) < count:
            while submitted < count and len(living) < 14 and source.random() < 0.6:
                params = traffic.params()
                prompt = traffic.prompt()
                living[submitted] = engine.add_request(submitted, prompt, params), params
                submitted += 1
            if living and source.random() < 0.02:
                engine.abort_request(source.choice(list(living)))
                deeds["aborted"] += 1
            if source.random() < 0.001:
                engine.reset_prefix_cache()
                deeds["cache resets"] += 1
            if source.random() < 0.001:
                engine.suspend()
                engine.resume()
                deeds["suspensions"] += 1
            if engine.has_unfinished_requests():
                engine.step_modern()
            engine.check()
            for request_id in [request_id for request_id, (future, _) in living.items() if future.done()]:
                future, params = living.pop(request_id)
                record = future.result()
                done.append((record, params))
                traffic.finished(record)
                bar.update()
    return done, deeds


def replay(model: torch.nn.Module, served: list[tuple[RequestRecord, RequestParams]]) -> list[str]:
    """Serve each alone without caching; what came out differently, a line each."""
    engine = new_engine(model, CacheConfig(enable_prefix_caching=False))
    different = []
    for record, params in tqdm(served, unit="replay", disable=None):
        future = engine.add_request(record.request_id, list(record.prompt_tokens), params)
        while engine.has_unfinished_requests():
            engine.step_modern()
        alone = future.result()
        got, expected = record.generated_tokens, alone.generated_tokens[: len(record.generated_tokens)]
        if got != expected and not _was_a_close_call(model, record, expected):
            different.append(f"request {record.request_id}: {got} in the crowd, {expected} alone")
    return different


@torch.inference_mode()
def _was_a_close_call(model: torch.nn.Module, record: RequestRecord, expected: tuple[int, ...]) -> bool:
    """Return whether the first tokens that differ had logits within rounding of each other."""
    got = record.generated_tokens
    first = next(i for i, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1])
    tokens = torch.tensor([[*record.prompt_tokens, *got[:first]]])
    logits = model(tokens, torch.arange(tokens.shape[1])[None], None)[0, -1]
    return (logits[got[first]] - logits[expected[first]]).abs().item() < MARGIN


def check_nothing_leaks(engine: InferenceEngine) -> None:
    """Check that without requests every block and slot is free or evictable."""
    use, scheduler = engine.scheduler.cache.use(), engine.scheduler
    leaked = {
        "blocks in use": use.blocks_in_use,
        "live slots": scheduler.limits.max_requests - scheduler.running_slots.free_count,
        "reserved slots": scheduler.cache.states.total - scheduler.cache.states.obtainable_count,
    }
    if any(leaked.values()):
        raise RuntimeError(f"left over: {leaked}")


def main() -> None:
    """Serve, check, replay, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--replays", type=int, default=300)
    parser.add_argument("--slots", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--policy", choices=[policy.value for policy in EvictionPolicyName], default="lru")
    parser.add_argument("--mode", choices=[mode.value for mode in SnapshotMode], default="kernel")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    platform.initialize()
    console = Console(highlight=False)
    console.print(header(platform.device(), torch.float32), markup=False)
    model = slow_model()
    cache = CacheConfig(eviction_policy=arguments.policy, snapshot_slots=arguments.slots, snapshot_mode=arguments.mode)
    engine = new_engine(model, cache)
    served, deeds = soak(engine, arguments.requests, arguments.seed)
    check_nothing_leaks(engine)
    completed = [(record, params) for record, params in served if record.status is Status.COMPLETED]
    sample = random.Random(arguments.seed).sample(completed, min(arguments.replays, len(completed)))
    different = replay(model, sample)
    console.print(_table(engine, served, deeds, len(sample), different))
    for line in different:
        console.print(line, markup=False)
    platform.shut_down()
    sys.exit(1 if different else 0)


def _table(
    engine: InferenceEngine,
    served: list[tuple[RequestRecord, RequestParams]],
    deeds: Counter,
    replayed: int,
    different: list[str],
) -> Table:
    counters = engine.scheduler.counters
    rows = Counter(record.status.name.lower() for record, _ in served)
    rows |= deeds
    rows |= Counter({"steps": engine.step_count, "requests evicted": counters.preemptions, "paused": counters.pauses})
    rows |= Counter({"tokens skipped": counters.skipped_tokens, "tokens computed": engine.lifetime_prefill_token_count})
    rows |= Counter(engine.prefix_cache_statistics())
    rows |= Counter({"replayed alone": replayed})
    table = Table("soak", "count")
    for name, value in rows.items():
        table.add_row(name, str(value))
    table.add_row("different", str(len(different)))
    return table


if __name__ == "__main__":
    main()
