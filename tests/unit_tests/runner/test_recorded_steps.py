"""Recorded decode steps equal those of the model's Python code to the bit, and are dropped when that would differ."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from megatron_ext.config import CacheConfig
from megatron_ext.config.speculation import SpeculationConfig
from megatron_ext.mixers.mamba2 import Mamba2Mixer
from megatron_ext.ops import cpp
from megatron_ext.runner import recorded_steps
from megatron_ext.runner.model_input import ModelInput
from tests.on_request import long_except
from tests.unit_tests.runner.short_models import CONFIGS
from tests.unit_tests.support.drafters import caching
from tests.unit_tests.support.driver import Driver, make_prompt
from tests.unit_tests.support.models import build_slow_decay

pytestmark = [
    pytest.mark.skipif(not cpp.can_be_built(), reason="no C++ compiler"),
]

KINDS = ["hybrid", "mamba1", "gated_delta_net", "short_conv", "side_by_side", "attention_only", "attention_free"]
PLAIN = {"return_log_probs": False}


class CountingDriver(Driver):
    """Driver that counts the forwards of the model's Python code.

    Attributes:
        python_steps: Forwards so far.
        drafted_python_steps: Those of them that verified drafts.
    """

    def __init__(self, *args: object, is_recording: bool = True, **options: object) -> None:
        self.python_steps = self.drafted_python_steps = 0
        super().__init__(*args, **options)
        if not is_recording:
            self.context.recorded_steps = None

    def _watch_forward(self) -> None:
        controller = self.engine.controller
        run = controller._run_model

        def counted() -> Tensor:
            self.python_steps += 1
            self.drafted_python_steps += any(chunk.target_sampling for chunk in self.context.staged.chunks)
            return run()

        controller._run_model = counted
        super()._watch_forward()


def pair(model: nn.Module, kind: str, **options: object) -> tuple[CountingDriver, CountingDriver]:
    """Return a driver whose decode steps are recorded, and one of the same model whose steps are not."""
    options = {"max_requests": 6, "cache": CacheConfig()} | options
    recording, plain = (
        CountingDriver(model, CONFIGS[kind], is_recording=is_recording, **options) for is_recording in (True, False)
    )
    assert recording.context.recorded_steps is not None
    return recording, plain


def assert_equal(recording: Driver, plain: Driver) -> None:
    """Compare all logits and states of all requests to the bit."""
    assert recording.seen.keys() == plain.seen.keys()
    for request_id, one in recording.seen.items():
        other = plain.seen[request_id]
        assert one.logits.keys() == other.logits.keys()
        for position, found in one.logits.items():
            assert torch.equal(torch.stack(found), torch.stack(other.logits[position])), (request_id, position)
        for position, states in one.states.items():
            for own, theirs in zip(states, other.states[position], strict=True):
                assert all(map(torch.equal, own, theirs)), (request_id, position)


def live(driver: Driver, seed: int = 0, steps: int = 40) -> None:
    """Add, continue and abort requests at random; the same for every driver."""
    source, added = random.Random(seed), 0
    stem = make_prompt(40)
    for _ in range(steps):
        if source.random() < 0.25:
            prompt = [*stem[: source.choice([0, 16, 32, 40])], *make_prompt(source.randint(1, 30), added)]
            drawn = {"temperature": 0.8, "top_k": 9, "seed": added} if source.random() < 0.3 else {}
            scored = {"return_log_probs": True, "skip_prompt_log_probs": True} if source.random() < 0.3 else PLAIN
            driver.add(added, prompt, num_tokens_to_generate=source.randint(1, 40), **drawn, **scored)
            added += 1
        living = [request.request_id for request in driver.scheduler.queues]
        if living and source.random() < 0.05:
            driver.engine.abort_request(source.choice(living))
        driver.step()
    driver.run()


@pytest.mark.parametrize("kind", long_except(["hybrid", "attention_only", "gated_delta_net"], KINDS))
def test_random_lives_equal_to_the_bit(get_oracle, kind):
    """Batches change, hits restore states, decodes cross blocks and leave snapshots, requests are aborted."""
    recording, plain = pair(get_oracle(kind).model, kind)
    for driver in (recording, plain):
        live(driver)
    assert_equal(recording, plain)
    assert recording.context.recorded_steps.problem == ""
    assert recording.python_steps < 0.8 * plain.python_steps


@pytest.mark.parametrize("mode", long_except(["kernel"], ["kernel", "align"]))
@pytest.mark.parametrize("kind", long_except(["hybrid", "attention_only"], KINDS))
def test_steps_with_drafts_equal_to_the_bit(get_oracle, kind, mode):
    """SP-18: various numbers of drafts, decodes beside them, states kept after each token, and rejections."""
    drafts = SpeculationConfig("ngram", 3, speculative_adaptive=False, speculative_ngram_shortest=1)
    recording, plain = pair(get_oracle(kind).model, kind, cache=caching(mode), speculation=drafts, max_requests=2)
    for driver in (recording, plain):
        live(driver, steps=70)
    assert_equal(recording, plain)
    assert recording.context.recorded_steps.problem_with_drafts == ""
    assert recording.scheduler.counters.accepted > 3
    assert recording.drafted_python_steps < plain.drafted_python_steps - 10


def test_drafts_whose_forward_reads_lengths_leave_decodes_recorded(get_oracle):
    """SP-18: what stops the records of steps with drafts does not stop those of others."""
    drafts = SpeculationConfig("ngram", 3, speculative_adaptive=False, speculative_ngram_shortest=1)
    recording, plain = pair(get_oracle("hybrid").model, "hybrid", speculation=drafts)
    for driver in (recording, plain):

        def forward(run, step):
            reads = step.num_decode < len(step.chunks)
            return run() * (1 if not reads or step.paged_batch.kv_lengths else 2)

        change_forward(driver, forward)
        live(driver)
    records = recording.context.recorded_steps
    assert (records.problem, records.problem_with_drafts) == ("", "lengths on the host")
    assert recording.python_steps < plain.python_steps
    assert_equal(recording, plain)


def first_mixer(model: nn.Module) -> Mamba2Mixer:
    return next(module for module in model.modules() if isinstance(module, Mamba2Mixer))


def edit_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        first_mixer(model).in_proj.weight.mul_(1.25)


def fill(model: nn.Module) -> None:
    with torch.no_grad():
        first_mixer(model).in_proj.weight.fill_(0.01)  # packed again within the step


def replace_data(model: nn.Module) -> None:
    for parameter in (first_mixer(model).conv1d.weight, first_mixer(model).in_proj.weight):
        parameter.data = parameter.data * 1.25


def replace_parameter(model: nn.Module) -> None:
    mixer = first_mixer(model)
    mixer.conv1d.weight = nn.Parameter(mixer.conv1d.weight.detach() * 1.25)


def replace_module(model: nn.Module) -> None:
    mixer = first_mixer(model)
    mixer.conv1d = copy.deepcopy(mixer.conv1d)
    with torch.no_grad():
        mixer.conv1d.weight.mul_(1.25)


def add_hook(model: nn.Module) -> None:
    first_mixer(model).register_forward_hook(lambda _, inputs, found: (found[0] * 1.25, found[1]))


def add_global_hook(model: nn.Module) -> None:
    def hook(module: nn.Module, inputs: object, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        return (found[0] * 1.25, found[1]) if module is first_mixer(model) else None

    register_module_forward_hook(hook)


def replace_forward(model: nn.Module) -> None:
    mixer = first_mixer(model)
    forward = mixer.forward
    mixer.forward = lambda *args, **options: (forward(*args, **options)[0] * 1.25, None)


def set_attribute(model: nn.Module) -> None:
    first_mixer(model).norm.eps = 0.5


def edit_config(model: nn.Module) -> None:
    model.config.activation_func = torch.tanh


CHANGES = [edit_in_place, fill, replace_data, replace_parameter, replace_module]
ATTRIBUTES = [replace_forward, set_attribute, edit_config]
HOOKS = [add_hook, add_global_hook]


@pytest.fixture(autouse=True)
def no_global_hooks() -> Iterator[None]:
    yield
    torch.nn.modules.module._global_forward_hooks.clear()


@pytest.mark.parametrize("packs_weights", [False, True])
@pytest.mark.parametrize("change", [*CHANGES, *ATTRIBUTES, *HOOKS])
def test_changes_of_the_model_are_seen(change, packs_weights, monkeypatch):
    """A change of the model between two steps counts in the next step, as it does without records.

    Nothing watches the weights here, which would send requests back to start again.
    """
    if packs_weights and change is replace_data:
        pytest.skip("a packed parameter has no values to replace")
    if packs_weights and change in ATTRIBUTES:
        pytest.skip("attributes are not packed")
    options = {"max_requests": 6, "packs_weights": packs_weights}
    options |= {"operator_backend": "onednn"} if packs_weights else {}
    drivers: list[CountingDriver] = []
    for is_recording in (True, False):
        model = build_slow_decay(CONFIGS["hybrid"])
        driver = CountingDriver(model, CONFIGS["hybrid"], is_recording=is_recording, **options)
        drivers.append(driver)
        monkeypatch.setattr(driver.engine.core.resources._weights, "has_changed", lambda: False)
        driver.add(0, make_prompt(20), num_tokens_to_generate=12, **PLAIN)
        for _ in range(8):
            driver.step()
        assert (driver.python_steps < 8) == is_recording
        if packs_weights and change is edit_in_place:
            first_mixer(model).in_proj.unpack()
        change(model)
        python_steps = driver.python_steps
        driver.run()
        torch.nn.modules.module._global_forward_hooks.clear()
        assert (driver.python_steps - python_steps < 4) == (is_recording and change not in HOOKS)
    assert_equal(*drivers)


def test_why_steps_run_python_code_is_said_once(get_oracle, caplog):
    """A forward with hooks, and one that cannot be repeated until its module is replaced."""
    recording, plain = pair(get_oracle("attention_only").model, "attention_only")
    reading = [recording, plain]
    for driver in (recording, plain):
        change_forward(driver, lambda run, step: run() * (1 if not reading or step.paged_batch.kv_lengths else 2))
    for driver in (recording, plain):
        live(driver)
    reading.clear()
    for driver in (recording, plain):
        driver.engine.controller.inference_wrapped_model.model.some_setting = driver  # anything may depend on it
        before = driver.python_steps
        driver.add(100, make_prompt(20), num_tokens_to_generate=40, **PLAIN)
        driver.run()
        driver.after = driver.python_steps - before
    assert recording.after < 0.6 * plain.after
    assert_equal(recording, plain)
    (warning,) = [one for one in caplog.records if one.name == recorded_steps.__name__]
    assert (warning.levelname, warning.getMessage().split(": ")[1]) == ("WARNING", "lengths on the host")


def test_a_model_that_is_changed_before_each_step_is_reported(get_oracle, caplog):
    """Once, after 16 changes without a repeated step between them; a change now and then is not."""
    recording, _ = pair(build_slow_decay(CONFIGS["hybrid"]), "hybrid")
    model = recording.engine.controller.inference_wrapped_model.model
    for often in (8, 1):
        recording.add(often, make_prompt(20), num_tokens_to_generate=60, **PLAIN)
        for number in range(60):
            if number % often == 0:
                model.some_setting = number
            recording.step()
        found = [one.getMessage() for one in caplog.records if one.name == recorded_steps.__name__]
        assert len(found) == (often == 1)
    assert "changed before each" in found[0]


def test_equal_values_that_are_written_keep_a_snapshot_current():
    """A forward may write them, or attributes that it deletes; other values, new ones and missing ones are changes."""
    model = build_slow_decay(CONFIGS["hybrid"])
    snapshot, norm = recorded_steps.ModuleSnapshot(model), first_mixer(model).norm
    eps = norm.eps
    for change in (set_attribute, lambda _: delattr(norm, "eps"), lambda _: setattr(norm, "rows", 3)):
        change(model)
        assert not snapshot.is_current
        norm.eps = eps * 1.0
        vars(norm).pop("rows", None)
        assert snapshot.is_current


def test_replaced_parameters_are_freed():
    """Records keep none of them, by whose end `WeightsWatch` notices the change."""
    model = build_slow_decay(CONFIGS["hybrid"])
    driver = CountingDriver(model, CONFIGS["hybrid"])
    driver.add(0, make_prompt(20), num_tokens_to_generate=8, **PLAIN)
    driver.run()
    old = weakref.ref(first_mixer(model).conv1d.weight)
    replace_parameter(model)
    driver.context.recorded_steps.check()
    assert old() is None


def test_a_model_that_reads_lengths_is_not_recorded(get_oracle, monkeypatch):
    """An operator that reads lengths on the host: every step runs the Python code, which is logged once."""
    recording, plain = pair(get_oracle("attention_only").model, "attention_only")
    for driver in (recording, plain):
        change_forward(driver, lambda run, step: run() * (1 if step.paged_batch.kv_lengths else 2))
        live(driver)
    assert recording.context.recorded_steps.problem == "lengths on the host"
    assert recording.python_steps == plain.python_steps
    assert_equal(recording, plain)


def change_forward(driver: Driver, forward: Callable[[Callable[[], Tensor], ModelInput], Tensor]) -> None:
    """Let the model's Python code be `forward`, which is given the original one and the step."""
    controller, run = driver.engine.controller, driver.engine.controller._run_model
    controller._run_model = lambda: forward(run, driver.context.step)


def test_a_model_that_computes_with_numbers_of_the_host_is_not_recorded(get_oracle):
    """A factor that changes from step to step is a constant of a record, so no two records of one size agree."""
    recording, plain = pair(get_oracle("hybrid").model, "hybrid")
    for driver in (recording, plain):
        change_forward(driver, lambda run, step: run() * (1.0 + step.chunks[0].end / 64))
        live(driver)
    assert "differ" in recording.context.recorded_steps.problem
    assert recording.python_steps == plain.python_steps
    assert_equal(recording, plain)
