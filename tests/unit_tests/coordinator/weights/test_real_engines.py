"""RL-7, RL-8: groups of samples on engines that compute, beside fresh engines of each version of the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from megatron_ext.config import BatchingConfig, CacheConfig, ServerConfig, SourceConfig
from megatron_ext.coordinator.weights.sample_groups import GROUP_HEADER
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.load import load_model
from megatron_ext.models.native.safetensors_checkpoint import save_checkpoint
from megatron_ext.models.update.disk import WeightsRoot
from megatron_ext.server.serving import Serving
from megatron_ext.server.weight_updater import WeightsUpdater
from tests.unit_tests.support.fleet import FakeReplica, Fronted, coordinator, eventually
from tests.unit_tests.support.hybrid_caching import HybridDriver
from tests.unit_tests.support.models import HYBRID, build_slow_decay
from tests.unit_tests.support.server import PATIENCE, LiveServer
from tests.unit_tests.support.updatable import PATH, update

GROUPS, TOKENS = 4, 40
CLOSE = 1e-4
SEEDS = {0: None, 1: 6, 2: None}  # of the weights of each version; None: the first ones
Choice = dict[str, object]


def started(folder: Path) -> LiveServer:
    source = SourceConfig(load=str(folder / "old"), tokenizer_type="NullTokenizer")
    updater = WeightsUpdater(WeightsRoot.of(str(folder)), load_model(source, {}), source, {})
    engine = build_engine(
        *(updater.loaded.model, HYBRID, updater.loaded.tokenizer),
        BatchingConfig(block_size=16, block_count=200, max_requests=16),
        CacheConfig(snapshot_slots=16),
        dtype=torch.float32,
    )
    settings = ServerConfig(api_key="key", enable_admin_routes=True, shutdown_timeout=5.0)
    live = LiveServer(Serving(engine, "tiny", settings))
    live.serving.updater = updater
    return live


@pytest.fixture
def servers(tmp_path) -> Iterator[list[LiveServer]]:
    save_checkpoint(tmp_path / "old", build_slow_decay(HYBRID), HYBRID)
    save_checkpoint(tmp_path / "new", build_slow_decay(HYBRID, seed=6), HYBRID)
    found = [started(tmp_path) for _ in range(2)]
    yield found
    for one in found:
        one.stop()


def prompt_of(group: int) -> list[int]:
    return [(7 * group + place) % 90 for place in range(40)]


def ask(front: Fronted, group: int, name: str | None) -> asyncio.Future[httpx.Response]:
    fields = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0, "logprobs": 1}
    shown = {"return_token_ids": True, "return_weights_version": True}
    headers = {} if name is None else {GROUP_HEADER: f"{name} {group}"}
    return asyncio.ensure_future(front.complete(prompt_of(group), headers=headers, **fields, **shown))


async def choices(asked: list[asyncio.Future[httpx.Response]]) -> list[Choice]:
    answers = await asyncio.gather(*asked)
    assert [answer.status_code for answer in answers] == [200] * len(asked), [answer.text[:200] for answer in answers]
    return [answer.json()["choices"][0] for answer in answers]


def versions(samples: list[Choice]) -> set[int]:
    return {version for one in samples for version, _ in one["weights_version"]}


def difference(group: int, sample: Choice) -> float:
    """Largest distance of the log-probs of a sample of one version from those of a fresh engine with these weights."""
    ((version, count),) = sample["weights_version"]
    assert count == TOKENS == len(sample["token_ids"])
    seed = SEEDS[version]
    driver = HybridDriver(build_slow_decay(HYBRID) if seed is None else build_slow_decay(HYBRID, seed=seed), HYBRID)
    prompt = prompt_of(group)
    driver.add(0, [*prompt, *sample["token_ids"]], num_tokens_to_generate=0, skip_prompt_log_probs=False)
    driver.run()
    wanted = list(driver.records[0].prompt_log_probs)[len(prompt) - 1 :]
    seen = sample["logprobs"]["token_logprobs"]
    return max(abs(one - other) for one, other in zip(seen, wanted, strict=True))


@pytest.mark.long
async def test_each_group_has_the_tokens_of_one_version(servers):
    """During a rolling update, with log-probs of fresh engines; the former fan-out mixes versions within a group."""
    fakes = [FakeReplica() for _ in servers]
    for fake, one in zip(fakes, servers, strict=True):
        fake.url = one.url
    async with coordinator(*fakes, replica_timeout=PATIENCE) as front:
        front.http.headers["authorization"] = "Bearer key"

        def running() -> bool:
            return sum(one.serving.requests.living for one in servers) == 2 * GROUPS

        asked = {group: [ask(front, group, None) for _ in range(2)] for group in range(GROUPS)}
        await eventually(running)
        calls = [front.http.post(f"{one.url}{PATH}", json={"model_path": "new"}) for one in servers]
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200, 200]
        for group, some in asked.items():
            some.append(ask(front, group, None))
        mixed = [versions(await choices(some)) for some in asked.values()]
        assert mixed == [{0, 1}] * GROUPS, "each is asked for the new weights at once"
        await front.coordination.fleet.look_again()

        asked = {group: [ask(front, group, "group") for _ in range(2)] for group in range(GROUPS)}
        await eventually(running)
        updating = asyncio.ensure_future(update(front, rollout="rolling", model_path="old"))
        await eventually(lambda: any(one.is_updating for one in front.coordination.fleet.members.values()))
        for group, some in asked.items():
            some.append(ask(front, group, "group"))
        samples = {group: await choices(some) for group, some in asked.items()}
        assert (await updating).json()["weights_version"] == 2
        new = {group: await choices([ask(front, group, "new") for _ in range(2)]) for group in range(GROUPS)}
        assert {(await ask(front, group, "group")).status_code for group in range(GROUPS)} == {409}
        assert [versions(some) for some in samples.values()] == [{1}] * GROUPS
        assert [versions(some) for some in new.values()] == [{2}] * GROUPS
    found = {group: [*samples[group], *new[group]] for group in samples}
    assert max(difference(group, one) for group, some in found.items() for one in some) < CLOSE
    swapped = {**samples[0][0], "weights_version": [[2, TOKENS]]}
    assert difference(0, swapped) > 100 * CLOSE, "the versions differ"
