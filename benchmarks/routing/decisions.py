"""Decisions a second of the router that serves, by the length of prompts and the number of known prefixes."""

from __future__ import annotations

import random
import time
from array import array

from benchmarks.cases import Figure, Run, case
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.routing.prompt import Prompt
from megatron_ext.routing.router import Router

BLOCK, IN_FLIGHT, BATCH = 16, 256, 50


@case("routing", quick={"count": 100, "families": (5,)})
def decisions(
    run: Run, count: int = 4000, blocks: tuple = (4, 64, 512), families: tuple = (50, 500), replicas: int = 64
) -> None:
    """Decisions a second of CPU: alone, with hashing, and with all events of a request; blocks of 16 tokens."""
    for length in blocks:
        for number in families:
            row, found = speed(length, number, count, replicas)
            run.row(row, found)


def speed(blocks: int, families: int, count: int, replicas: int) -> tuple[str, dict[str, Figure]]:
    """Measure one router.

    A family of prompts shares a quarter with others; three replicas hold up to all of it.
    """
    draw = random.Random(0)
    router = Router(RoutingConfig())
    for i in range(replicas):
        router.join(str(i), BLOCK)
    openings = [_tokens(draw, blocks // 4) for _ in range(8)]
    tokens = []
    for family in range(families):
        tokens.append(openings[family % 8] + _tokens(draw, blocks - blocks // 4))
        for replica in draw.sample(range(replicas), 3):
            depth = draw.randint(blocks // 4, blocks)
            names = [(family % 8, i) if i < blocks // 4 else (family, i, "") for i in range(depth)]
            router.members[str(replica)].stored(names, None, tokens[-1][: depth * BLOCK])
    known = sum(len(one.blocks) for one in router.members.values())
    prompts = [tokens[draw.randrange(families)] for _ in range(count)]
    hashing = choosing = life = 0.0
    for i in range(0, count, BATCH):
        begun = time.thread_time()
        batch = [Prompt(one) for one in prompts[i : i + BATCH]]
        for one in batch:
            one.keys(BLOCK)
        hashed = time.thread_time()
        chosen = [router.route(one) for one in batch]
        decided = time.thread_time()
        for j, (prompt, decision) in enumerate(zip(batch, chosen, strict=True), start=i):
            router.began(j, decision, prompt, 100)
            if j >= IN_FLIGHT:
                router.ended(j - IN_FLIGHT)
        hashing, choosing, life = (
            hashing + hashed - begun,
            choosing + decided - hashed,
            life + time.thread_time() - decided,
        )
    return f"{blocks} blocks, {known:,} known", {
        "decisions/s": count / choosing,
        "with hashing/s": count / (hashing + choosing),
        "with all events/s": count / (hashing + choosing + life),
    }


def _tokens(draw: random.Random, blocks: int) -> array[int]:
    return array("I", (draw.randrange(2**17) for _ in range(blocks * BLOCK)))
