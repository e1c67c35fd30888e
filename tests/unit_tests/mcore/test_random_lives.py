"""Random events in any order: requests that end well equal the oracle, and nothing is lost or leaked.

Engines without a cache, with one, with snapshots in both modes, and with drafts; in tiny pools.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import pytest

from megatron_ext.scheduling.record import Status
from tests.on_request import long_except
from tests.unit_tests.support.caching import BLOCK, Broken, CachingDriver, failing_forward
from tests.unit_tests.support.drafters import Knowing, any_token, caching, nonsense, right_for_a_while, wrong
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, few_prefills, make_prompt
from tests.unit_tests.support.hybrid_caching import PLENTY, build_driver, failing_scan
from tests.unit_tests.support.oracle import Oracle
from tests.unit_tests.support.pools_in_pieces import pools_in_pieces

ACTIONS = 45


@pytest.fixture(autouse=True)
def _pools(request: pytest.FixtureRequest) -> Iterator[None]:
    """Half of the lives are in pools whose blocks and snapshots lie as in an arena."""
    seed = request.node.callspec.params.get("seed", 0) if hasattr(request.node, "callspec") else 0
    with pools_in_pieces() if seed % 2 else contextlib.nullcontext():
        yield


class Life:
    """Random additions, turns of chats, steps, aborts, suspensions, failures and resets of one engine."""

    def __init__(self, driver: Driver, source: random.Random) -> None:
        self.driver, self.source = driver, source
        self.added = 0
        self.stems = [make_prompt(48, seed=seed) for seed in range(2)]

    def _add(self, prompt: list[int]) -> None:
        choose = self.source.choice
        self.driver.add(
            self.added,
            prompt[:90],
            num_tokens_to_generate=self.source.randint(1, 20),
            skip_prompt_log_probs=choose([True, True, True, True, False]),
            enable_prefix_caching=choose([True, True, True, True, False]),
            cache_salt=choose([None, None, None, None, "other"]),
        )
        self.added += 1

    def add(self) -> None:
        stem = self.source.choice(self.stems)[: self.source.choice([1, 15, 16, 17, 32, 33, 47, 48])]
        self._add([*stem, *make_prompt(self.source.choice([0, 0, 1, 2, 16, 30]), seed=self.source.randint(0, 3))])

    def turn(self) -> None:
        """Continue the tokens of an ended request."""
        records = list(self.driver.records.values())
        if records:
            record = self.source.choice(records)
            self._add([*record.prompt_tokens, *record.generated_tokens, *make_prompt(3, seed=self.added)])

    def step(self) -> None:
        self.driver.step()

    def abort(self) -> None:
        queues = self.driver.scheduler.queues
        living = [request.request_id for request in queues if request.audit is None]
        if living:
            self.driver.engine.abort_request(self.source.choice(living))
            self.driver.engine.check()

    def suspend(self) -> None:
        self.driver.engine.suspend()
        self.driver.engine.check()
        if self.source.random() < 0.5:
            self.add()
        self.driver.engine.resume()

    def forget(self) -> None:
        self.source.choice([self.driver.engine.reset_prefix_cache, self.driver.engine.weights_changed])()
        self.driver.engine.check()

    def fail(self) -> None:
        failing = failing_forward if self.driver.context.allocated.live_states is None else failing_scan
        with failing(self.source.randint(0, 3)), contextlib.suppress(Broken):
            self.driver.step()
        self.driver.engine.check()

    def live(self, oracle: Oracle, actions: int = ACTIONS) -> None:
        """Act, run to the end, and check that all requests have ended with the oracle's outputs."""
        weights = {self.add: 5, self.turn: 2, self.step: 16, self.abort: 1, self.fail: 1}
        weights |= {self.suspend: 0.3, self.forget: 0.3}
        for action in self.source.choices(list(weights), list(weights.values()), k=actions):
            action()
        self.driver.run()
        self.check(oracle)

    def check(self, oracle: Oracle) -> None:
        assert len(self.driver.records) == self.added
        for request_id, record in self.driver.records.items():
            if record.status is Status.COMPLETED:
                assert_equals_oracle(self.driver, request_id, oracle)
            else:
                tokens = record.generated_tokens
                expected = oracle.greedy(record.prompt_tokens, max(1, len(tokens)), guess=tokens).tokens
                assert tokens == expected[: len(tokens)]
                assert (record.error is None) == (record.status is Status.ABORTED)


def seeds(quick: Sequence[int], count: int) -> list:
    """Numbers below `count`; the first two that are not quick are long, and the rest is for soak tests."""
    others = [seed for seed in range(count) if seed not in quick]
    return long_except(quick, range(count), long=others[:2])


def tiny(source: random.Random, blocks: list[int]) -> dict[str, object]:
    """Limits that requests soon reach."""
    max_requests = source.choice([1, 2, 4])
    return {
        "block_count": source.choice(blocks),
        "max_requests": max_requests,
        "max_tokens": max_requests + source.choice([0, 1, 2, 15, 40]),
        "paused_buffer_size_gb": source.choice([None, None, 0]),
    }


@pytest.mark.parametrize("seed", seeds([3], 6))
def test_without_a_cache(get_driver, get_oracle, seed):
    source, kind = random.Random(seed), ["hybrid", "attention_only"][seed % 2]
    Life(get_driver(kind, **tiny(source, [3, 6, 12])), source).live(get_oracle(kind))


@pytest.mark.parametrize("seed", seeds([2, 3], 6))
def test_with_a_cache_of_blocks(get_oracle, monkeypatch, seed):
    """KV-2 to KV-6, KV-13, EX-1 to EX-5, EX-8, RL-10; SC-3: many prefills in a step, and few."""
    source = random.Random(f"shared blocks {seed}")
    policy = ["lru", "ref_zero"][seed % 2]
    at_once = [2, 4, 6] if policy == "lru" else [4, 6]  # with ref_zero only requests that overlap in time share
    batching = tiny(source, [5, 6, 8, 14]) | {"max_requests": source.choice(at_once)}
    batching |= {"max_tokens": batching["max_tokens"] + 5} | few_prefills(monkeypatch, are_few=seed % 2 == 1)
    driver = build_driver(get_oracle, "attention_only", policy=policy, log_probs=True, **batching)
    life = Life(driver, source)
    for _ in range(4):
        life.live(get_oracle("attention_only"))
        if driver.engine.core.counters.skipped_tokens:
            break
    assert driver.engine.core.counters.skipped_tokens > 0


@pytest.mark.parametrize("seed", seeds([2], 6))
def test_with_snapshots(get_oracle, monkeypatch, seed):
    """HY-2 to HY-6, EX-1 to EX-5, EX-8, RL-10."""
    source = random.Random(f"snapshots {seed}")
    kind, slots = ["hybrid", "attention_free"][seed % 3 == 2], [PLENTY, 2, 4, 1, 0, PLENTY][seed]
    batching = tiny(source, [6, 12, 200]) | few_prefills(monkeypatch, are_few=seed % 2 == 1)
    policy = source.choice(["lru", "ref_zero"])
    driver = build_driver(get_oracle, kind, policy=policy, slots=slots, log_probs=True, **batching)
    Life(driver, source).live(get_oracle(kind))
    assert (driver.states.taken > 0) is (slots > 0), "a life without snapshots proves nothing about them"


def prefills(driver: CachingDriver) -> list[tuple[int, int]]:
    """Chunks that end before their prompts do."""
    records = driver.records.items()
    return [
        chunk for name, record in records for chunk in driver.seen[name].chunks if chunk[1] < len(record.prompt_tokens)
    ]


@pytest.mark.parametrize("seed", seeds([0], 3))
def test_with_a_budget_of_a_block(get_oracle, seed):
    """LA-1, LA-5: chunks of `align` mode end inside blocks, beside decodes; of several kinds of recurrent layers."""
    source, kind = random.Random(f"align {seed}"), ["hybrid", "gated_delta_net", "mamba1"][seed]
    batching = tiny(source, [12, 200, 200]) | {"max_requests": source.choice([2, 4, 6])}
    batching["max_tokens"] = BLOCK + source.choice([0, 0, 1, 3])
    slots = source.choice([PLENTY, 2, 4])
    driver = build_driver(get_oracle, kind, slots=slots, mode="align", log_probs=True, **batching)
    Life(driver, source).live(get_oracle(kind))
    assert any(end % BLOCK for _, end in prefills(driver)), "no chunk ended inside a block"


class Prophet(Knowing):
    """Drafter that knows the oracle's tokens, which it computes when a request is new."""

    def __init__(self, oracle: Oracle, answer, seed: int) -> None:
        super().__init__(answer, seed)
        self._oracle = oracle
        self.driver: Driver | None = None

    def propose(self, asks):
        for ask in asks:
            if ask.request_id not in self.truth:
                request = self.driver.engine.get_request(ask.request_id)
                count = request.params.num_tokens_to_generate
                coming = self._oracle.greedy(request.prompt_tokens, count).tokens
                self.truth[ask.request_id] = (*request.prompt_tokens, *coming)
        return super().propose(asks)


def life_with_drafts(get_driver, oracle: Oracle, kind: str, source: random.Random, answer, **settings: object) -> Life:
    drafter = Prophet(oracle, answer, source.randint(0, 99))
    drafter.driver = get_driver(kind, drafter=drafter, **settings)
    return Life(drafter.driver, source)


@pytest.mark.parametrize("seed", seeds([0], 4))
def test_with_drafts(get_driver, get_oracle, seed):
    """SP-3, SP-5: pauses, preemptions, aborts, suspensions, failing steps, resets; few blocks, slots and tokens."""
    source = random.Random(f"drafts {seed}")
    kind, mode = ["hybrid", "gated_delta_net", "attention_only", "mamba1"][seed], ["kernel", "align", None][seed % 3]
    batching = tiny(source, [8, 10, 14]) | {"max_requests": source.choice([2, 3, 4])}
    batching["max_tokens"] = max(16, batching["max_tokens"])
    life = life_with_drafts(
        get_driver,
        get_oracle(kind),
        kind,
        source,
        [right_for_a_while, any_token, nonsense][seed % 3],
        cache=caching(mode, source.choice([1, 3, 20])),
        speculative_tokens=source.choice([1, 3, 7]),
        **batching,
    )
    life.live(get_oracle(kind))
    assert life.driver.scheduler.counters.drafted > 10


def test_a_drafter_costs_its_drafts_only(get_driver, get_oracle, caplog):
    """An error or invalid drafts are counted each time, logged once of each kind, and have no other effect."""
    oracle = get_oracle("attention_only")
    life = life_with_drafts(get_driver, oracle, "attention_only", random.Random(1), nonsense, speculative_tokens=3)
    for _ in range(4):
        life.add()
    life.driver.run()
    life.check(oracle)
    said = [record.getMessage() for record in caplog.records if "the drafter failed" in record.getMessage()]
    assert len(said) == 2, "once for an error, once for invalid drafts"
    assert life.driver.engine.core.error_isolation.count > len(said)


def test_a_paused_request_keeps_the_state_that_it_goes_on_from(get_driver, get_oracle):
    """The request returned the block of a rejected draft, and an older request needed that block for a token."""
    drafter, oracle = Knowing(wrong), get_oracle("hybrid")
    settings = {"cache": caching("kernel", 1), "speculative_tokens": 1, "block_count": 3}
    driver = get_driver("hybrid", drafter=drafter, **settings)
    for name in range(2):
        driver.add(name, make_prompt(12, name), num_tokens_to_generate=11)
    drafter.truth[1] = (*make_prompt(12, 1), *oracle.greedy(make_prompt(12, 1), 11).tokens)
    kept = []
    while driver.engine.has_unfinished_requests():
        driver.step()
        kept += [request.draft_states for request in driver.scheduler.queues.paused]
    driver.run()
    assert kept
    assert all([one.position for one in states] == [16] for states in kept)
    for name in range(2):
        assert_equals_oracle(driver, name, oracle)
