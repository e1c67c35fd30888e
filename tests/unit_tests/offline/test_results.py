"""KV-11, MF-6: keys of the results, frozen, and their values; Megatron's checker takes the requests' file."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from operator import attrgetter
from types import SimpleNamespace

import pytest

import megatron_ext
from megatron_ext.commands.run import DONE, main
from megatron_ext.engine.statistics import StepCounts
from megatron_ext.memory.budget import KVCacheConfig
from megatron_ext.offline.passes import Pass
from megatron_ext.offline.results import (
    MEGATRON_KEYS,
    RUN_KEYS,
    RequestEntries,
    full_results,
    megatron_results,
    run_results,
)
from megatron_ext.scheduling.explanation import Explanation
from megatron_ext.scheduling.request_events import Event, EventType
from tests.functional_tests import megatron_rules
from tests.functional_tests.megatron_rules import problems, run_megatrons_checker
from tests.unit_tests.offline.conftest import make_record

BATCHING = "--inference-dynamic-batching"
MEGATRONS = "input_prompt generated_text generated_tokens latency ttft top_n_logprobs prompt_top_n_logprobs".split()
LOG_PROBS = "prompt_logprobs generated_logprobs logprobs".split()
OURS = """
status error finish_reason request_step_count prompt_token_count matched_block_count skipped_prefill_token_count
computed_prefill_token_count recomputed_token_count prefill_reasons
""".split()
OF_PASS = ["step_count", "cuda_graph_request_count_map"]
GEOMETRY_KEYS = """
block_size_tokens block_bytes state_bytes state_in_kv_tokens blocks snapshot_slots live_states kernel_chunk
shortest_prompt_that_can_hit max_model_len
""".split()
RUN = ["--prompts", "What does a generator do?", "The import statement", "def", "--num-tokens-to-generate", "8"]
RUN += ["--return-log-probs", f"{BATCHING}-block-count", "64", f"{BATCHING}-prefix-caching-mamba-slots", "4"]
FULL = ("--output-format", "full")
ENTRIES = RequestEntries(attrgetter("prompt_text"), lambda tokens, **_: "".join("ab"[token // 7] for token in tokens))


@pytest.fixture
def engine():
    geometry = KVCacheConfig(64, 1024, 512, 32, 10, 0, 64, 64, None, max_model_len=640)
    statistics = SimpleNamespace(
        counters=SimpleNamespace(skipped_tokens=5),
        prefix_cache=lambda: {"blocks_total": 10},
        prefix_cache_lost=lambda: {"requests": 0},
        speculation=None,
        prefix_cache_disk=lambda: {"blocks": 3},
    )
    return SimpleNamespace(geometry=geometry, counts=lambda: (statistics, StepCounts(9, Counter({4: 2}), 3, 1, 6)))


@pytest.fixture
def passes(record) -> list[Pass]:
    last = StepCounts(7, Counter({8: 2, 4: 3}), 2, 1)
    return [Pass((record(0), record(1)), 2.0, StepCounts(5)), Pass((record(2), record(3)), 1.0, last)]


class TestKeys:
    """The keys are an interface."""

    def test_of_the_requests_file(self, passes):
        assert list(megatron_results(passes, ENTRIES)) == ["0", "1", *MEGATRON_KEYS]
        assert set(MEGATRON_KEYS) == megatron_rules.RUN_KEYS

    def test_of_the_run(self, engine, passes):
        assert (
            *MEGATRON_KEYS,
            "lifetime_skipped_token_count",
            "model",
            "version",
            "prefix_cache",
            "prefix_cache_lost",
            "speculation",
            "geometry",
            "prefix_cache_disk",
        ) == RUN_KEYS
        run = run_results(engine, passes, "a model")
        assert list(run) == list(RUN_KEYS)
        assert list(run["geometry"]) == GEOMETRY_KEYS
        assert list(full_results(run, passes, ENTRIES)) == ["0", "1", "2", "3", *RUN_KEYS]

    def test_of_a_request(self, record):
        assert list(ENTRIES.entry(record())) == [*MEGATRONS, *OURS]
        assert (
            list(
                RequestEntries(attrgetter("prompt_text"), lambda tokens, **_: str(tokens), with_events=True).entry(
                    record()
                )
            )[-1]
            == "events"
        )
        with_log_probs = ENTRIES.entry(record(generated_log_probs=(-0.5, -1.0)))
        assert list(with_log_probs) == [*MEGATRONS, *LOG_PROBS, *OURS]
        assert list(ENTRIES.counts(Pass((), 1.0))) == OF_PASS


class TestValues:
    def test_of_the_run(self, engine, passes):
        run = run_results(engine, passes, "a model")
        assert run["throughput"] == [2.0, 4.0]
        assert run["mem-max-allocated-bytes"] > 1_000_000
        assert run["lifetime_prefill_token_count"] == 6
        assert run["lifetime_skipped_token_count"] == 5
        assert (run["async_sched_step_count"], run["async_sched_compaction_step_count"]) == (3, 1)
        assert (run["model"], run["version"]) == ("a model", megatron_ext.__version__)
        assert run["prefix_cache"] == {"blocks_total": 10}
        assert run["speculation"] is None

    def test_of_the_last_pass(self, passes):
        results = megatron_results(
            passes, RequestEntries(attrgetter("prompt_text"), lambda tokens, **_: str(tokens), with_graphs=True)
        )
        assert results["lifetime_prefill_token_count"] == 6
        assert (results["async_sched_step_count"], results["async_sched_compaction_step_count"]) == (2, 1)
        for key in "01":
            assert (results[key]["step_count"], results[key]["request_step_count"]) == (7, 2)
            assert results[key]["cuda_graph_request_count_map"] == {"4": 3, "8": 2}
        assert results["throughput"] == [2.0, 4.0]

    def test_the_last_pass_is_the_last_that_began(self, passes, record):
        interrupted = [*passes, Pass((record(4), record(5)), 0.0)]
        assert megatron_results(interrupted, ENTRIES)["0"]["step_count"] == 7
        assert megatron_results(interrupted[2:], ENTRIES)["0"]["step_count"] == 0

    def test_every_pass_in_the_full_format_has_its_steps(self, engine, passes):
        results = full_results(run_results(engine, passes, "a model"), passes, ENTRIES)
        assert [results[key]["step_count"] for key in "0123"] == [5, 5, 7, 7]

    def test_of_a_request(self, record):
        entry = RequestEntries(attrgetter("prompt_text"), lambda tokens, **_: str(tokens), with_events=True).entry(
            record()
        )
        assert entry["generated_tokens"] == [7, 8]
        assert entry["status"] == "COMPLETED"
        assert entry["prompt_token_count"] == 3
        assert sum(entry["prefill_reasons"].values()) == entry["computed_prefill_token_count"]
        assert entry["events"] == [
            {"type": "ADD_ENGINE", "timestamp": 1e9, "payload": None},
            {"type": "FINISH", "timestamp": 1e9 + 1, "payload": None},
        ]
        assert Event(EventType.GENERATED_TOKEN, 0.0, {"token_id": 4}).to_dict()["payload"] == {"token_id": 4}

    def test_log_probs_of_prompt_and_generation(self, record):
        scores = {"prompt_log_probs": (-3.0, -4.0), "generated_log_probs": (-0.5, -1.0)}
        entry = ENTRIES.entry(record(**scores))
        assert entry["logprobs"] == [-3.0, -4.0, -0.5, -1.0]
        assert entry["top_n_logprobs"] is entry["prompt_top_n_logprobs"] is None

    def test_best_tokens_of_one_text_are_one_key(self, record):
        """The best of them counts."""
        best = ({1: -0.5, 2: -3.0, 8: -1.0},)
        entry = ENTRIES.entry(record(generated_log_probs=(-0.5,), generated_top_n_log_probs=best))
        assert entry["top_n_logprobs"] == [{"a": -0.5, "b": -1.0}]

    def test_tokens_that_were_removed_have_a_number(self, record):
        """JSON has no infinity."""
        best = ({1: 0.0, 2: -math.inf, 8: -math.inf},)
        entry = ENTRIES.entry(record(generated_log_probs=(0.0,), generated_top_n_log_probs=best))
        assert entry["top_n_logprobs"] == [{"a": 0.0, "b": -9999.0}]


def test_an_explanation_has_both_tokens_and_the_text():
    """SI-5: all prompts of a run are its caller's, so the cached token is shown, too."""
    explained = make_record(
        prompt_tokens=(3, 10, 3, 3),
        prefix_cache_explanation=Explanation("parted", 0, 0, 4, 4, agreeing=2, here=3, there=5, age=1.23),
    )
    said = ENTRIES.entry(explained)["prefix_cache_explanation"]
    assert (said["here"], said["there"], said["before"], said["after"], said["age"]) == (3, 5, "ab", "aa", 1.2)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A function: the requests' file of a run of the embedded model with more flags, and its counts (None: no file)."""
    folder = tmp_path_factory.mktemp("results")

    def run(*flags: str) -> tuple[dict, dict | None]:
        output, counts = folder / "out.json", folder / "out.run.json"
        counts.unlink(missing_ok=True)
        assert main([*RUN, "--output-path", str(output), *flags]) == DONE
        return json.loads(output.read_text("utf-8")), json.loads(counts.read_text("utf-8")) if counts.exists() else None

    return run


@pytest.fixture(scope="module")
def once(written) -> tuple[dict, dict]:
    """Results of one pass."""
    return written("--top-n-logprobs", "2")


@pytest.fixture(scope="module")
def thrice(written) -> dict:
    """Requests' file of three passes with events."""
    return written("--inference-repeat-n", "3", "--top-n-logprobs", "2", "--output-request-events")[0]


class TestRuns:
    """Files that the command `run` writes."""

    def test_the_checker_takes_it(self, once, thrice):
        """MF-6: three passes as well as one, since the ids of the last pass begin at 0."""
        golden = {key: once[0][key] for key in "012"} | {"throughput": [1.0]}
        assert problems(golden, thrice, megatron_rules.COMPARED) == []
        run_megatrons_checker(golden, thrice, megatron_rules.COMPARED)
        assert len(thrice["throughput"]) == 3

    def test_the_checker_can_fail(self, once, written):
        golden = {key: once[0][key] for key in "012"}
        extra = [f"unexpected {key}" for key in sorted(set(RUN_KEYS[:-1]) - set(MEGATRON_KEYS))]
        assert problems(golden, written(*FULL)[0], megatron_rules.COMPARED) == extra
        for change in (
            lambda entry: entry["generated_tokens"].append(3),
            lambda entry: entry["logprobs"].append(-1.0),
            lambda entry: entry["logprobs"].__setitem__(0, entry["logprobs"][0] + 0.002),
            lambda entry: entry.update(generated_text="X" + entry["generated_text"]),
            lambda entry: entry.update(step_count=None),
            lambda entry: entry.update(prompt_logprobs=None),
            lambda entry: entry.pop("ttft"),
        ):
            broken = copy.deepcopy(once[0])
            change(broken["1"])
            assert len(problems(golden, broken, megatron_rules.COMPARED)) == 1

    def test_the_counts_go_where_they_are_asked_for(self, written, tmp_path):
        elsewhere = tmp_path / "counts"
        assert written("--run-output-path", str(elsewhere))[1] is None
        assert list(json.loads(elsewhere.read_text())) == list(RUN_KEYS[:-1])
        elsewhere.unlink()
        assert written("--run-output-path", "")[1] is None
        results, counts = written("--run-output-path", str(elsewhere), *FULL)
        assert counts is None
        assert json.loads(elsewhere.read_text()).items() <= results.items()

    def test_the_counts_cover_all_passes(self, written, thrice, once):
        counts = written("--inference-repeat-n", "3")[1]
        prefilled = once[0]["lifetime_prefill_token_count"]
        assert thrice["lifetime_prefill_token_count"] == once[1]["lifetime_prefill_token_count"] == prefilled
        assert counts["lifetime_prefill_token_count"] == 3 * prefilled
        assert thrice["0"]["step_count"] == once[0]["0"]["step_count"]

    def test_events(self, thrice, written):
        """Events have wall clock times; those of generated tokens are there if tracked."""
        events = thrice["0"]["events"]
        assert [event["type"] for event in events] == ["ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN", "FINISH"]
        assert all(event["timestamp"] > 1.7e9 for event in events)
        first, tokens = events[0]["timestamp"], thrice["0"]["ttft"]
        assert events[2]["timestamp"] - first == pytest.approx(tokens, abs=1e-5)
        tracked, _ = written("--output-request-events", f"{BATCHING}-track-generated-token-events")
        events = tracked["0"]["events"]
        ids = [event["payload"]["token_id"] for event in events if event["type"] == "GENERATED_TOKEN"]
        assert ids == tracked["0"]["generated_tokens"]
        times = [event["timestamp"] for event in events]
        assert times == sorted(times)

    @pytest.mark.parametrize("form", ["full", "megatron"])
    def test_every_nth_result_and_the_last(self, written, form):
        """Results keep their ids; throughput counts all requests."""
        more = ("--output-format", form, "--inference-repeat-n", "2", "--output-every-n-results", "2")
        every, _ = written(*more)
        ids = {key for key in every if key.isdigit()}
        assert ids == ({"0", "2"} if form == "megatron" else {"0", "2", "3", "5"})
        assert len(every["throughput"]) == 2
