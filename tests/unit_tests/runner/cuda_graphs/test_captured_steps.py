"""Two steps of one bucket are the same program on other numbers, which is what a CUDA graph needs; seen on a CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from megatron_ext.config import CacheConfig
from megatron_ext.runner.cuda_graphs.buckets import Bucket
from megatron_ext.runner.cuda_graphs.cuda_graph_runner import BucketGraphs
from tests.on_request import long_except
from tests.unit_tests.runner.short_models import CONFIGS
from tests.unit_tests.support.driver import Driver, make_prompt
from tests.unit_tests.support.padded import PaddedDriver, operators_by
from tests.unit_tests.support.programs import ProgramRecorder, differences

KINDS = ["hybrid", "mamba1", "gated_delta_net", "short_conv", "attention_only", "experts"]
SETTINGS = {"max_requests": 8, "num_cuda_graphs": 2, "max_sequence_length": 64}  # 4 or 8 decodes; 1, 2 or 4 blocks
PLACES = list(itertools.product(["default", "reference"], KINDS))
PLAIN = {"return_log_probs": False}


class Unwatched:
    """Logits are not looked at, which would be operations of their own."""

    def _watch_forward(self) -> None:
        pass


class PaddedUnwatched(Unwatched, PaddedDriver):
    """Padded driver whose steps are recorded."""


class PlainUnwatched(Unwatched, Driver):
    """Plain driver for comparison, whose steps run the model's Python code."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.context.recorded_steps = None


class Recorded:
    """A driver whose computing is recorded, step by step.

    Attributes:
        programs: Recorded program of each step since the last look.
        chunks: Computed chunks, as (start, end) for each request.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.programs: list[ProgramRecorder] = []
        self.is_on = False
        fixed = driver.context.cuda_graph_runner
        if fixed is None:
            controller = driver.engine.controller
            self._watch(controller, "forward")
            self._watch(controller, "sample", begins=False)
        else:
            self._make, fixed._make = fixed._make, self._make_watched

    def _make_watched(self, bucket: Bucket) -> BucketGraphs:
        graphs = self._make(bucket)
        self._watch(graphs.choice, "run", begins=False)
        return dataclasses.replace(graphs, forward=self._recorded(graphs.forward))

    def _watch(self, owner: object, name: str, *, begins: bool = True) -> None:
        setattr(owner, name, self._recorded(getattr(owner, name), begins=begins))

    def _recorded(self, compute: Callable[..., object], *, begins: bool = True) -> Callable[..., object]:
        """Record calls, in a program of their own or after the forward of the step."""

        def recorded(*arguments: object) -> object:
            if not self.is_on:
                return compute(*arguments)
            if begins:
                self.programs.append(ProgramRecorder())
            with self.programs[-1]:
                return compute(*arguments)

        return recorded

    def step(self) -> ProgramRecorder:
        """The program of the next step."""
        self.programs.clear()
        self.is_on = True
        self.driver.step()
        self.is_on = False
        (program,) = self.programs
        return program


def recorded(get_oracle, kind: str, driver=PaddedUnwatched, *, is_ahead: bool = False, **settings: object) -> Recorded:
    settings = (SETTINGS if driver is PaddedUnwatched else {"max_requests": 8}) | settings
    run = Recorded(driver(get_oracle(kind).model, CONFIGS[kind], cache=CacheConfig(), **settings))
    if driver is PaddedUnwatched and not is_ahead:
        run.driver.wait_for_tokens()
    return run


def decode_steps(run: Recorded, **params: object) -> tuple[ProgramRecorder, ProgramRecorder]:
    """Record decode steps of two requests, and of three others at other lengths, one of which leaves a snapshot."""
    driver = run.driver
    for request_id, length in enumerate((35, 40)):
        driver.add(request_id, make_prompt(length), num_tokens_to_generate=7, **(PLAIN | params))
    driver.step()
    run.step()
    first = run.step()
    driver.run()
    for request_id, length in enumerate((45, 37, 50), start=10):
        driver.add(request_id, make_prompt(length), num_tokens_to_generate=9, **(PLAIN | params))
    driver.step()
    taken = 0 if driver.context.allocated.live_states is None else driver.scheduler.cache.states.taken
    for _ in range(3):  # the first of them ends a block in the third
        second = run.step()
    if driver.context.allocated.live_states is not None:
        assert driver.scheduler.cache.states.taken > taken, "a snapshot was to be taken in this step"
    driver.run()
    return first, second


@pytest.mark.parametrize(
    ("backend", "kind"), long_except([*PLACES[:2], *PLACES[len(KINDS) : len(KINDS) + 2]], PLACES), ids=str
)
def test_decode_steps_are_the_same_program(get_oracle, kind, backend):
    """CU-4: requests and lengths do not matter, nor a snapshot in one of the steps; nothing is read back."""
    with operators_by("reference") if backend == "reference" else contextlib.nullcontext():
        run = recorded(get_oracle, kind)
        first, second = decode_steps(run)
    assert len(set(run.driver.buckets)) >= 2, "prefill and decode"
    assert first.operations
    assert not differences(first, second)
    assert not first.unfit


@pytest.mark.parametrize("kind", ["hybrid", "attention_only"])
def test_steps_that_are_launched_ahead_are_the_same_program(get_oracle, kind):
    """CU-4, CU-6: tokens from the host, or from wherever the step before left them; nothing is read back."""
    run = recorded(get_oracle, kind, is_ahead=True)
    driver = run.driver
    driver.add(2, make_prompt(9), num_tokens_to_generate=4, **PLAIN)
    driver.run()  # megatron-core computes rotary frequencies once
    launched = driver.steps_ahead
    for request_id, length in enumerate((35, 40)):
        driver.add(request_id, make_prompt(length), num_tokens_to_generate=12, **PLAIN)
    driver.step()
    run.is_on = True
    driver.step()
    known, ahead = run.programs
    assert driver.steps_ahead == launched, "the step that was launched ahead is the next one"
    moved = run.step()
    assert driver.steps_ahead == launched + 1
    for one in (ahead, moved):
        assert not differences(known, one)
        assert not one.unfit


def test_scored_and_shaped_steps_are_the_same_program(get_oracle):
    """CU-5: log-probs with the best tokens, penalties, biases, bad words, min_p and min_tokens are in fixed places."""
    scored = {"return_log_probs": True, "skip_prompt_log_probs": True, "top_n_logprobs": 4}
    penalties = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.2}
    words = {"bad_words": ("<5>", "<7><9>"), "logit_bias": {3: 1.5}, "min_tokens": 7}
    drawn = {"temperature": 0.9, "min_p": 0.05}
    run = recorded(get_oracle, "hybrid")
    first, second = decode_steps(run, **scored, **penalties, **words, **drawn)
    assert run.driver.eager_steps == 0
    assert not differences(first, second)
    assert not first.unfit


def test_plain_steps_are_not(get_oracle):
    """The negative control: today's path bakes in lengths, rows and addresses, and makes tensors on the host."""
    run = recorded(get_oracle, "hybrid", PlainUnwatched)
    first, second = decode_steps(run)
    assert any("shape" in one for one in differences(first, second))
    for request_id in (20, 21):
        run.driver.add(request_id, make_prompt(30, request_id), num_tokens_to_generate=6, **PLAIN)
    run.driver.step()
    first, second = run.step(), run.step()  # of the same two requests
    assert any("address" in one for one in differences(first, second))


@pytest.mark.parametrize("kind", long_except(["hybrid", "experts"], KINDS))
def test_mixed_steps_of_a_bucket_are_the_same_program(get_oracle, kind):
    """CU-4, CU-5: steps of one prefill after a restored snapshot, and of two cut at other snapshots, are equal."""
    with operators_by("reference"):
        run = recorded(get_oracle, kind)
        driver = run.driver
        stem = make_prompt(33)
        driver.add(0, stem, num_tokens_to_generate=14, **PLAIN)
        driver.step()
        driver.add(1, [*stem, *make_prompt(12, 1)], num_tokens_to_generate=4, **PLAIN)
        first = run.step()
        assert driver.engine.get_request(1).ledger.matched_blocks == 2
        for request_id, length in ((2, 34), (3, 20)):
            driver.add(request_id, make_prompt(length, request_id), num_tokens_to_generate=3, **PLAIN)
        second = run.step()
        bucket = driver.buckets[-1]
        assert (bucket.prefills, bucket.tokens) == (4, 64)
        assert driver.buckets[-2] == bucket
        driver.run()
    assert driver.engine.core.counters.skipped_tokens > 0
    assert not differences(first, second)
    assert not first.unfit


def test_a_step_is_sent_in_one_copy(get_oracle):
    """CU-4: one host buffer is copied to one place on the device each time; answers return in one copy."""
    run = recorded(get_oracle, "hybrid")
    driver, sent = run.driver, []
    places = driver.context.cuda_graph_runner._buffers
    send, fetch = places.send, driver.context.cuda_graph_runner._outputs.fetch

    def watched(function):
        def call(*arguments, **options):
            with (copies := ProgramRecorder()):
                found = function(*arguments, **options)
            sent.append([one for one in copies.operations if "copy" in one[0]])
            return found

        return call

    driver.add(0, make_prompt(40), num_tokens_to_generate=6)
    for _ in range(2):
        driver.step()
    places.send, driver.context.cuda_graph_runner._outputs.fetch = watched(send), watched(fetch)
    for _ in range(3):
        driver.step()
    assert [len(copies) for copies in sent] == [1] * 6
    targets = [copies[0][1][0].place for copies in sent[::2]]
    sources = [copies[0][1][1].place for copies in sent[::2]]
    assert len(set(targets)) == 1
    assert sources[0] == sources[2] != sources[1], "two buffers of the host take turns"


def test_recorder_finds_operations_that_no_graph_can_have():
    """The recorder sees a read-back, a tensor from the host, a boolean index, an address, a number, and a shape."""

    def record(*, number: float = 2.0, rows: int = 3, tensor=torch.arange(6.0)) -> ProgramRecorder:  # noqa: B008
        with (program := ProgramRecorder()):
            (tensor[:rows] * number).sum()
        return program

    base = record()
    assert not differences(base, record())
    assert set(differences(base, record(number=3.0))) == {"aten::mul.Tensor: a number from the host"}
    assert any("shape" in one for one in differences(base, record(rows=2)))
    assert any("address" in one for one in differences(base, record(tensor=torch.arange(6.0).clone())))
    with (program := ProgramRecorder()):
        mask = torch.ones(3) > torch.tensor(0.5)
        torch.arange(3)[mask].sum().item()
    assert {"aten::_local_scalar_dense", "aten::index.Tensor", "aten::lift_fresh"} <= set(program.unfit)
