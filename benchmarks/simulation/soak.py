"""Soak of the engine: random requests through pools that are far too small, every invariant checked after every step.

Chats whose turns continue from their answers, shared prefixes, salted, opted-out, sampled and aborted requests, resets
of the cache. Afterwards some requests are served again, each alone in an engine without caching, and must give the same
tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import torch

from benchmarks.cases import Figure, Run, case
from benchmarks.models import OFF, Engine, engine, random_model
from megatron_ext.config import CacheConfig, ModelConfig, RequestParams
from megatron_ext.mcore import platform
from megatron_ext.models.load import LoadedModel
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.request import Request

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
POOLS = {"block_count": 24, "block_size": 16, "max_requests": 8, "max_tokens": 48}
LONGEST_PROMPT, MAX_LIVE = 150, 14  # tokens; requests
MARGIN = 1e-4  # logits closer than this may swap by rounding


@dataclass
class Traffic:
    """Source of prompts: a few texts with which many requests begin, and chats that continue earlier answers."""

    random: random.Random
    prefixes: list[list[int]] = field(init=False)
    chats: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefixes = [self._tokens(length) for length in (16, 33, 48, 64, 100)]

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(SHAPE.vocab_size) for _ in range(count)]

    def prompt(self) -> list[int]:
        """Return a chat's next turn, a known prefix with its own end, or something new."""
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
        """Return random sampling parameters of a request."""
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
        """Note a record from which a conversation may continue."""
        said = [*record.prompt_tokens, *record.generated_tokens]
        if len(said) < LONGEST_PROMPT - 20 and self.random.random() < 0.7:
            self.chats.append(said)
            del self.chats[:-12]


def slow_model() -> LoadedModel:
    """Build random weights whose states decay slowly, so that a wrong state changes the text."""
    loaded = random_model(SHAPE)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-4.0, -2.0)
            elif parameter.dim() == 2:
                parameter.mul_(4.0)
    return loaded


Served = list[tuple[RequestRecord, RequestParams]]


def serve(built: Engine, count: int, seed: int) -> tuple[Served, Counter[str]]:
    """Serve `count` requests; return their records and parameters, and counts of the actions."""
    source, traffic, core = random.Random(seed), Traffic(random.Random(seed + 1)), built.core
    live: dict[int, Request] = {}
    done: Served = []
    events: Counter[str] = Counter()
    submitted = 0
    while len(done) < count:
        while submitted < count and len(live) < MAX_LIVE and source.random() < 0.6:
            params = traffic.params()
            request = built.add(traffic.prompt(), params)
            live[request.request_id] = request
            submitted += 1
        if live and source.random() < 0.02:
            core.output.abort(live[source.choice(list(live))])
            events["aborted"] += 1
        if source.random() < 0.001:
            core.reset_prefix_cache()
            events["cache resets"] += 1
        if source.random() < 0.001:
            core.suspend()
            core.resume()
            events["suspensions"] += 1
        for record in built.step().records if core.is_busy else ():
            done.append((record, live.pop(record.request_id).params))
            traffic.finished(record)
        core.check()
    return done, events


def replay(loaded: LoadedModel, served: Served) -> list[str]:
    """Serve each request alone without caching; return a line for each that has other tokens."""
    built = engine(loaded, OFF, **POOLS)
    different = []
    for record, params in served:
        (alone,) = built.generate([record.prompt_tokens], params)
        got, expected = record.generated_tokens, alone.generated_tokens[: len(record.generated_tokens)]
        if got != expected and not _was_close(loaded.model, record, expected):
            different.append(f"request {record.request_id}: {got} among others, {expected} alone")
    return different


@torch.inference_mode()
def _was_close(model: torch.nn.Module, record: RequestRecord, expected: tuple[int, ...]) -> bool:
    """Return whether the first tokens that differ had logits within rounding of each other."""
    got = record.generated_tokens
    first = next(i for i, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1])
    tokens = torch.tensor([[*record.prompt_tokens, *got[:first]]])
    logits = model(tokens, torch.arange(tokens.shape[1])[None], None)[0, -1]
    return (logits[got[first]] - logits[expected[first]]).abs().item() < MARGIN


def leaks(built: Engine) -> dict[str, int]:
    """Return counts of blocks and slots that are neither free nor evictable although no request runs."""
    scheduler = built.core.scheduler
    found = {
        "blocks in use": scheduler.cache.use().blocks_in_use,
        "running state slots": scheduler.limits.max_requests - scheduler.running_slots.free_count,
        "reserved slots": scheduler.cache.states.total - scheduler.cache.states.obtainable_count,
    }
    return {name: count for name, count in found.items() if count}


@case("simulation", quick={"requests": 40, "replays": 5})
def soak(
    run: Run,
    requests: int = 3000,
    replays: int = 300,
    slots: int = 6,
    seed: int = 1,
    policy: str = "lru",
    mode: str = "kernel",
) -> None:
    """Soak of the engine with a tiny model; each request has the same tokens with the cache as alone."""
    platform.initialize()
    loaded = slow_model()
    cache = CacheConfig(eviction_policy=policy, snapshot_slots=slots, snapshot_mode=mode)
    built = engine(loaded, cache, **POOLS)
    served, events = serve(built, requests, seed)
    left = leaks(built)
    completed = [one for one in served if one[0].status is Status.COMPLETED]
    sample = random.Random(seed).sample(completed, min(replays, len(completed)))
    different = replay(loaded, sample)
    for line in different:
        run.remark(line)
    counters = built.core.counters
    found: dict[str, Figure] = {**Counter(record.status.name.lower() for record, _ in served), **events}
    found |= {"steps": built.core.step_count, "preempted": counters.preemptions, "paused": counters.pauses}
    found |= {"tokens skipped": counters.skipped_tokens, "tokens computed": counters.prefill_tokens}
    found |= {**(built.core.statistics().prefix_cache() or {}), "replayed alone": len(sample)}
    for name, figure in found.items():
        run.row(name, {"count": figure})
    run.row("replayed alone", {"same tokens": not different})
    run.row("blocks_total", {"nothing leaks": not left})
