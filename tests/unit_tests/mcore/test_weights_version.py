"""RL-2, RL-3: log-probs and versions of tokens on both sides of a change of the weights, beside fresh engines."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.mamba import MambaModel

from megatron_ext.config.in_flight import InFlight
from megatron_ext.scheduling.record import RequestRecord
from tests.unit_tests.support.caching import BLOCK
from tests.unit_tests.support.driver import Driver, make_prompt
from tests.unit_tests.support.hybrid_caching import HybridDriver
from tests.unit_tests.support.models import CONFIGS, build_slow_decay

DECODING = make_prompt(4 * BLOCK + 5)  # has generated 20 of 40 tokens when the weights change
PREFILLING = make_prompt(6 * BLOCK + 1, seed=1)  # and its prompt is scored
WAITING = [*DECODING[: 3 * BLOCK], *make_prompt(9, seed=2)]  # shares blocks and states with the first
KINDS = [
    "hybrid",
    "gated_delta_net",
    *(pytest.param(kind, marks=pytest.mark.long) for kind in ("mamba1", "short_conv")),
]
CLOSE = {"rel": 1e-4, "abs": 1e-4}


def write_new_weights(model: MambaModel) -> None:
    """Move the weights a little, as a step of training does."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=generator))


def fresh_log_probs(kind: str, record: RequestRecord, *, by_new: bool) -> list[float]:
    """Log-probs of all tokens of a record after the first, by a new engine of the old weights or the new."""
    model = build_slow_decay(CONFIGS[kind])
    if by_new:
        write_new_weights(model)
    driver = HybridDriver(model, CONFIGS[kind])
    whole = [*record.prompt_tokens, *record.generated_tokens]
    driver.add(0, whole, num_tokens_to_generate=0, skip_prompt_log_probs=False)
    driver.run()
    return list(driver.records[0].prompt_log_probs)


class Update:
    """Requests at each stage, a change of the weights among them, and log-probs by the old weights and by the new."""

    def __init__(self, kind: str, in_flight: InFlight, version: int | None = None, **settings: object) -> None:
        self.kind = kind
        model = build_slow_decay(CONFIGS[kind])
        self.driver = driver = HybridDriver(model, CONFIGS[kind], max_tokens=40, **settings)
        driver.add(0, DECODING, num_tokens_to_generate=24)
        while not driver.engine.has_unfinished_requests() or driver.engine.get_request(0).generated_count < 10:
            driver.step()
        driver.add(1, PREFILLING, skip_prompt_log_probs=False)
        driver.step()
        driver.step()
        self.generated = driver.engine.get_request(0).generated_count
        assert 0 < driver.engine.get_request(1).computed_end < len(PREFILLING)
        driver.add(2, WAITING)
        write_new_weights(model)
        driver.engine.core.weights_changed(in_flight, version)
        driver.run()
        self.records = driver.records

    def differences(self, request_id: int, *, by_new: bool) -> list[float]:
        """Distance of each generated token's log-prob from what a fresh engine computes for it."""
        record = self.records[request_id]
        wanted = fresh_log_probs(self.kind, record, by_new=by_new)[record.prompt_token_count - 1 :]
        return [abs(one - other) for one, other in zip(record.generated_log_probs, wanted, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed(kind: str):
    """RL-2, RL-3: each log-prob is that of the version that made the token, and no prefix is of another version."""
    update = Update(kind, InFlight.RECOMPUTE, 17)
    decoding, prefilling, waiting = (update.records[i] for i in range(3))
    count = update.generated
    assert decoding.weights_version == decoding.prefix_weights_version == ((0, count), (17, 24 - count))
    assert prefilling.weights_version == waiting.weights_version == ((17, 8),)
    by_old, by_new = update.differences(0, by_new=False), update.differences(0, by_new=True)
    assert max(by_old[:count]) < 1e-4
    assert max(by_new[count:]) < 1e-4
    assert max(by_old[count:]) > 1e-3, "the versions differ, so that each comparison can fail"
    assert max(by_new[:count]) > 1e-3
    assert decoding.recomputed_token_count == len(DECODING) + count - 1
    for request_id in (1, 2):
        assert max(update.differences(request_id, by_new=True)) < 1e-4
    scores = fresh_log_probs(kind, prefilling, by_new=True)[: len(PREFILLING) - 1]
    assert prefilling.prompt_log_probs == pytest.approx(scores, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_continued(kind: str):
    """RL-3: the negative control: tokens on keys, values and states of both versions are marked, and differ."""
    update = Update(kind, InFlight.CONTINUE)
    count = update.generated
    decoding, prefilling, waiting = (update.records[i] for i in range(3))
    assert decoding.weights_version == ((0, count), (1, 24 - count))
    assert decoding.prefix_weights_version == ((0, 24),)
    assert (prefilling.weights_version, prefilling.prefix_weights_version) == (((1, 8),), ((0, 8),))
    assert waiting.weights_version == waiting.prefix_weights_version == ((1, 8),)
    assert decoding.recomputed_token_count == 0
    assert max(update.differences(0, by_new=False)[:count]) < 1e-4
    assert max(update.differences(0, by_new=True)[count:]) > 1e-3
    assert max(update.differences(2, by_new=True)) < 1e-4, "nothing of the old version is in the cache"


def test_noticed_changes_count_too():
    """RL-2: edits of parameters are noticed, with the cache off too: another version, and all is computed again."""
    for driver_class in (HybridDriver, Driver):
        model = build_slow_decay(CONFIGS["hybrid"])
        driver = driver_class(model, CONFIGS["hybrid"])
        driver.add(0, DECODING, num_tokens_to_generate=12)
        while driver.engine.step_count < 5:
            driver.step()
        count = driver.engine.get_request(0).generated_count
        write_new_weights(model)
        driver.run()
        assert driver.records[0].weights_version == ((0, count), (1, 12 - count))
        assert driver.records[0].recomputed_token_count == len(DECODING) + count - 1


def test_a_reset_of_the_engine_keeps_the_version():
    """RL-2: requests and counters go; the weights are the same."""
    model = build_slow_decay(CONFIGS["hybrid"])
    driver = HybridDriver(model, CONFIGS["hybrid"])
    driver.engine.core.weights_changed(InFlight.RECOMPUTE, 41)
    driver.engine.reset()
    driver.watch_scheduler()
    driver.sight(0, DECODING)
    driver.engine.core.weights_changed()
    driver.sight(1, DECODING)
    assert [driver.records[i].weights_version for i in (0, 1)] == [((41, 4),), ((42, 4),)]
