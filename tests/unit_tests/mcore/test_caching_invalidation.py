"""EX-4, FX-1: blocks and states from before a reset, or of other weights, are not matched, nor published later."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_ext.config.in_flight import InFlight
from megatron_ext.mcore.weight_changes import saved_tensors
from tests.unit_tests.support.caching import BLOCK, CachingDriver
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import HybridDriver, build_driver
from tests.unit_tests.support.models import ATTENTION_ONLY, build_slow_decay
from tests.unit_tests.support.oracle import Oracle
from tests.unit_tests.support.weights import by_assignment, by_edits, by_parts, by_state_dict

PROMPT = make_prompt(6 * BLOCK + 4)
SHORT = make_prompt(4 * BLOCK + 5)
LONG = [*SHORT, *make_prompt(61, seed=1)]


def restart(driver: HybridDriver) -> None:
    driver.engine.suspend()
    driver.engine.check()
    driver.engine.resume()


FORGET: dict[str, Callable[[HybridDriver], None]] = {
    "reset_prefix_cache": lambda driver: driver.engine.reset_prefix_cache(),
    "weights_changed": lambda driver: driver.engine.core.weights_changed(InFlight.CONTINUE),
    "suspend_and_resume": restart,
}


@pytest.fixture(params=FORGET)
def forget_states(request) -> Callable[[HybridDriver], None]:
    return FORGET[request.param]


def assert_empty(driver: HybridDriver) -> None:
    driver.engine.check()
    use = driver.scheduler.cache.use()
    assert (use.blocks_cached, use.slots_used) == (0, 0)
    assert driver.states.obtainable_count == driver.states.total


def test_with_requests_at_every_stage(get_oracle, forget_states):
    """The requests decode, prefill after a resume with a reserved slot, or wait for that slot."""
    driver = build_driver(get_oracle, max_tokens=40)
    driver.add(0, SHORT, num_tokens_to_generate=30)
    for _ in range(2):
        driver.step()
    driver.add(1, LONG)
    driver.add(2, [*LONG, 5])
    driver.step()
    assert driver.engine.get_request(1).computed_end == 64 + 39
    assert [one.position for one in driver.engine.get_request(1).snapshots] == [128]
    forget_states(driver)
    assert_empty(driver)
    driver.run()
    assert driver.skipped(0, 1) == [0, 64]
    assert driver.sight(3, LONG) == 128
    for request_id in range(4):
        assert_equals_oracle(driver, request_id, get_oracle("hybrid"))


@pytest.mark.parametrize("kind", ["hybrid", "attention_free"])
def test_suspend_frees_both_pools(get_oracle, kind):
    """A suspended engine has no tensor of either pool left."""
    driver = build_driver(get_oracle, kind)
    driver.sight(0, SHORT)
    driver.engine.suspend()
    context = driver.context
    assert context.pools is None
    assert_empty(driver)
    driver.engine.resume()
    assert context.allocated.snapshots.conv.shape[1] == driver.states.total
    assert driver.sight(1, SHORT) == 0
    assert driver.sight(2, SHORT) == 64
    assert_equals_oracle(driver, 2, get_oracle(kind))


class TestIdleDummyStep:
    """FX-1: the branch that resets the context in the base is forced."""

    def test_between_requests_and_among_them(self, get_oracle):
        driver, oracle = build_driver(get_oracle, "experts", max_tokens=40), get_oracle("experts")
        driver.context.cuda_graph_batch_dimensions_list = [object()]

        def idle() -> None:
            before = (driver.engine.core.statistics().prefix_cache(), driver.engine.lifetime_prefill_token_count)
            snapshots = driver.context.allocated.snapshots
            content = [pool.clone() for pool in (snapshots.conv, snapshots.ssm)]
            driver.engine.controller.dummy_forward()
            driver.engine.check()
            assert (
                driver.engine.core.statistics().prefix_cache(),
                driver.engine.lifetime_prefill_token_count,
            ) == before
            for pool, old in zip((snapshots.conv, snapshots.ssm), content, strict=True):
                assert pool.allclose(old, equal_nan=True)

        driver.add(0, SHORT, num_tokens_to_generate=20)
        for _ in range(3):
            idle()
            driver.step()
        driver.add(1, LONG)
        driver.add(2, [*LONG, 5])
        for _ in range(3):
            driver.step()
            idle()
        driver.run()
        idle()
        assert driver.skipped(0, 1, 2) == [0, 64, 128]
        assert driver.sight(3, LONG) == 128
        for request_id in range(4):
            assert_equals_oracle(driver, request_id, oracle)


def overwrite(model: torch.nn.Module, seed: int) -> None:
    """New weights, in place, in a way that nothing notices."""
    new = dict(build_slow_decay(ATTENTION_ONLY, seed=seed).named_parameters())
    for name, parameter in model.named_parameters():
        parameter.data.copy_(new[name].data)


def edit_one(model: torch.nn.Module, _: dict[str, torch.Tensor]) -> None:
    """Change one value of one tensor."""
    with torch.inference_mode():
        next(model.parameters())[5, 7] += 6


def replace(model: torch.nn.Module, new: dict[str, torch.Tensor]) -> None:
    """Other tensors in their places."""
    for prefix, module in model.named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(new[f"{prefix}.{name}"].clone()))


class TestNewWeights:
    """Weights that do change: outputs are those of the new ones."""

    @pytest.fixture
    def driver(self) -> CachingDriver:
        return CachingDriver(build_slow_decay(ATTENTION_ONLY), ATTENTION_ONLY)

    @pytest.mark.parametrize("write", [by_state_dict, by_assignment, by_parts, by_edits, edit_one, replace])
    def test_writes_that_are_noticed_without_a_call(self, driver, write):
        """EX-4: a request in flight goes on; the next step matches nothing old, and publishes what is new."""
        model = driver.engine.controller.inference_wrapped_model.model
        driver.add(0, PROMPT)
        driver.run()
        write(model, saved_tensors(build_slow_decay(ATTENTION_ONLY, seed=6)))
        for request_id in (1, 2):
            driver.add(request_id, PROMPT)
            driver.run()
        assert driver.skipped(1, 2) == [0, 96]
        for request_id in (1, 2):
            assert_equals_oracle(driver, request_id, Oracle(model))

    def test_steps_alone_change_nothing(self, driver):
        """Negative control: what the engine's own steps do to the model is not a change of weights."""
        for request_id in range(3):
            driver.add(request_id, PROMPT)
            driver.run()
        assert driver.skipped(0, 1, 2) == [0, 96, 96]

    def test_parameters_of_inference_mode(self):
        """EX-4: inference-mode parameters have no version counter; they are served, and the hook covers them."""
        with torch.inference_mode():
            model = build_slow_decay(ATTENTION_ONLY)
        driver = CachingDriver(model, ATTENTION_ONLY)
        driver.add(0, PROMPT)
        driver.run()
        with torch.inference_mode():
            by_state_dict(model, saved_tensors(build_slow_decay(ATTENTION_ONLY, seed=6)))
        driver.add(1, PROMPT)
        driver.run()
        assert driver.skipped(1) == [0]
        assert_equals_oracle(driver, 1, Oracle(model))

    def test_weights_changed_without_notice(self, driver):
        """Negative control, EX-4: writes through `data` without the call match old KV, and the comparison sees it."""
        model = driver.engine.controller.inference_wrapped_model.model
        driver.add(0, PROMPT)
        driver.run()
        overwrite(model, seed=6)
        driver.add(1, PROMPT)
        driver.run()
        assert driver.skipped(1) == [96]
        with pytest.raises(AssertionError):
            assert_equals_oracle(driver, 1, Oracle(model))

    def test_while_suspended(self, driver):
        """New weights loaded while suspended, as in an RL refit, compute all waiting requests.

        Generated tokens are kept.
        """
        model = driver.engine.controller.inference_wrapped_model.model
        driver.add(0, PROMPT, num_tokens_to_generate=12)
        driver.add(1, PROMPT)
        for _ in range(4):
            driver.step()
        kept = len(driver.engine.get_request(0).generated_tokens)
        driver.engine.suspend()
        overwrite(model, seed=6)
        driver.engine.weights_changed()
        driver.engine.resume()
        driver.run()
        driver.add(2, PROMPT)
        driver.run()
        assert driver.skipped(2) == [96]
        new = Oracle(model)
        assert_equals_oracle(driver, 2, new)
        tokens = driver.records[0].generated_tokens
        after = new.greedy([*PROMPT, *tokens[:kept]], 12 - kept)
        assert tokens[kept:] == after.tokens

    def test_two_engines_around_one_model(self, driver):
        """The version is the model's: an engine that was not told notices before its next step."""
        other = CachingDriver(driver.engine.controller.inference_wrapped_model.model, ATTENTION_ONLY)
        other.add(0, PROMPT)
        other.run()
        overwrite(driver.engine.controller.inference_wrapped_model.model, seed=6)
        driver.engine.weights_changed()
        other.add(1, PROMPT)
        other.run()
        assert other.skipped(1) == [0]
        assert_equals_oracle(other, 1, Oracle(driver.engine.controller.inference_wrapped_model.model))
