"""SI-3: requests submitted by step skip equal tokens in the engine and in the simulator."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from megatron_ext.config import BatchingConfig, CacheConfig, EvictionPolicyName, RequestParams
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.simulation.replay import Replay
from megatron_ext.simulation.trace import Turn
from megatron_ext.text.tokenizer import NullTokenizer
from tests.on_request import long_except
from tests.unit_tests.support.models import CONFIGS

REQUESTS, VOCABULARY = 120, 97
BATCHING = BatchingConfig(block_count=40, block_size=16, max_requests=6, max_tokens=64)


@dataclass
class Life:
    """Request with its arrival step and its outcome."""

    step: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...] = ()
    skipped: int = 0


class Users:
    """Prompts that begin like one of a few texts, or go on from an answer."""

    def __init__(self) -> None:
        self.random = random.Random(3)
        self.texts = [self.text(length) for length in (33, 64, 90)]

    def text(self, length: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(VOCABULARY) for _ in range(length))

    def prompt(self, done: list[Life]) -> tuple[int, ...]:
        if done and self.random.random() < 0.4:
            before = self.random.choice(done[-6:])
            if len(before.prompt) < 150:
                return before.prompt + before.answer + self.text(self.random.randint(1, 20))
        return self.random.choice(self.texts) + self.text(self.random.randint(1, 40))


def in_engine(model, policy: str, slots: int) -> tuple[list[Life], dict[str, int], object]:
    cache = CacheConfig(eviction_policy=policy, snapshot_slots=slots)
    config = CONFIGS["hybrid"]
    engine = build_engine(model, config, NullTokenizer(VOCABULARY), BATCHING, cache, dtype=torch.float32)
    users, lives, done, step = Users(), [], [], 0
    while len(done) < REQUESTS:
        if step % 2 == 0 and len(lives) < REQUESTS:
            life = Life(step, users.prompt(done))
            count = users.random.randint(1, 6)
            engine.add_request(len(lives), life.prompt, RequestParams(num_tokens_to_generate=count, ignore_eos=True))
            lives.append(life)
        step += 1
        if not engine.has_unfinished_requests():
            continue
        for record in engine.step_modern()["finished_request_records"]:
            life = lives[record.request_id]
            life.answer, life.skipped = record.generated_tokens, record.skipped_prefill_token_count
            done.append(life)
    return lives, engine.core.statistics().prefix_cache(), engine.core.scheduler.limits


def in_simulator(lives: list[Life], limits, policy: str, slots: int) -> tuple[list[int], dict[str, int]]:
    turns = [Turn(place, 0.0, (life.prompt,), life.answer) for place, life in enumerate(lives)]
    replay = Replay(turns, limits, EvictionPolicyName(policy), slots)
    replay.coming.clear()  # they come by step
    step = place = 0
    while place < len(lives) or len(replay.scheduler.queues):
        if place < len(lives) and lives[place].step == step:
            replay.submit(place)
            place += 1
        step += 1
        if len(replay.scheduler.queues):
            replay.step()
            replay.scheduler.check()
    return replay.outcome.skipped, replay.statistics().prefix_cache()


@pytest.mark.parametrize(("policy", "slots"), long_except([("lru", 5)], [("lru", 12), ("lru", 5)]))
def test_request_by_request(get_oracle, policy: str, slots: int):
    lives, statistics, limits = in_engine(get_oracle("hybrid").model, policy, slots)
    skipped, simulated = in_simulator(lives, limits, policy, slots)
    assert skipped == [life.skipped for life in lives]
    assert simulated == statistics
    assert statistics["blocks_evicted"] > 0
    assert statistics["slots_evicted"] > 0
    assert sum(skipped) > 1000
    other, _ = in_simulator(lives, limits, "ref_zero", slots)
    assert other != skipped, "it would not have seen another policy"
