"""MF-6: results as Megatron-LM's own checker of golden values takes them."""

from __future__ import annotations

import copy
import json
import math

import pytest

from megatron_ext.offline.megatron_results import build_megatron_results
from megatron_ext.offline.passes import Pass
from megatron_ext.offline.results import SYSTEM_KEYS
from megatron_ext.scheduling.request_events import Event, EventType
from tools.run_inference import DONE, main

BATCHING = "--inference-dynamic-batching"
MEGATRON = ("--output-format", "megatron")
# Keys of its script that are not requests.
THEIR_SYSTEM_KEYS = {
    "throughput",
    "mem-max-allocated-bytes",
    "lifetime_prefill_token_count",
    "async_sched_step_count",
    "async_sched_compaction_step_count",
}
THEIR_KEYS = {
    "input_prompt",
    "generated_text",
    "generated_tokens",
    "latency",
    "ttft",
    "cuda_graph_request_count_map",
    "step_count",
    "top_n_logprobs",
    "prompt_top_n_logprobs",
    "prompt_logprobs",
    "generated_logprobs",
    "logprobs",
}
RUN = ["--prompts", "What does a generator do?", "The import statement", "def", "--num-tokens-to-generate", "8"]
RUN += ["--return-log-probs", f"{BATCHING}-block-count", "64", f"{BATCHING}-prefix-caching-mamba-slots", "4"]


def problems(golden: dict, current: dict) -> list[str]:
    """Problems that the checker finds: exact tokens, log-probs within 1e-3, texts up to the shorter length."""
    ids = set(golden) - THEIR_SYSTEM_KEYS
    found = [f"unexpected {one}" for one in sorted(set(current) - THEIR_SYSTEM_KEYS - ids)]
    for one in sorted(ids & set(current)):
        theirs, ours = golden[one], current[one]
        if theirs["generated_tokens"] != ours["generated_tokens"]:
            found.append(f"tokens of {one}")
        pairs = list(zip(theirs["logprobs"], ours["logprobs"], strict=False))
        if len(theirs["logprobs"]) != len(ours["logprobs"]):
            found.append(f"number of log-probs of {one}")
        elif not all(math.isclose(a, b, abs_tol=1e-3) for a, b in pairs):
            found.append(f"log-probs of {one}")
        length = min(len(theirs["generated_text"]), len(ours["generated_text"]))
        if not length or theirs["generated_text"][:length] != ours["generated_text"][:length]:
            found.append(f"text of {one}")
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A function: the JSON of a run of the embedded model with more flags."""
    folder = tmp_path_factory.mktemp("results")

    def run(*flags: str) -> dict:
        assert main([*RUN, "--output-path", str(folder / "out.json"), *flags]) == DONE
        return json.loads((folder / "out.json").read_text("utf-8"))

    return run


@pytest.fixture(scope="module")
def ours(written) -> dict:
    """Results of one pass in our format."""
    return written("--top-n-logprobs", "2")


@pytest.fixture(scope="module")
def theirs(written) -> dict:
    """Three passes in theirs."""
    return written(*MEGATRON, "--inference-repeat-n", "3", "--top-n-logprobs", "2", "--output-request-events")


def test_their_keys_alone(theirs):
    assert set(theirs) == {"0", "1", "2"} | THEIR_SYSTEM_KEYS
    for one in "012":
        assert set(theirs[one]) == THEIR_KEYS | {"events"}
        assert theirs[one]["cuda_graph_request_count_map"] is None


def test_the_checker_is_content(ours, theirs):
    """The checker accepts three passes as it does one: the last pass's ids begin at 0."""
    golden = {one: ours[one] for one in "012"} | {"throughput": [1.0]}
    assert problems(golden, theirs) == []
    assert len(theirs["throughput"]) == 3


def test_the_checker_can_fail(ours, theirs):
    golden = {one: ours[one] for one in "012"}
    assert problems(golden, ours) == [f"unexpected {key}" for key in sorted(set(SYSTEM_KEYS) - THEIR_SYSTEM_KEYS)]
    for change in (
        lambda entry: entry["generated_tokens"].append(3),
        lambda entry: entry["logprobs"].append(-1.0),
        lambda entry: entry["logprobs"].__setitem__(0, entry["logprobs"][0] + 0.002),
        lambda entry: entry.update(generated_text="X" + entry["generated_text"]),
    ):
        broken = copy.deepcopy(theirs)
        change(broken["1"])
        assert len(problems(golden, broken)) == 1


def test_log_probs(ours, theirs, written):
    """Log-probs cover P - 1 prompt tokens, or none if they are skipped."""
    for one in "012":
        assert theirs[one]["prompt_logprobs"] == pytest.approx(ours[one]["prompt_logprobs"], abs=1e-5)
        assert theirs[one]["logprobs"] == theirs[one]["prompt_logprobs"] + theirs[one]["generated_logprobs"]
        assert len(theirs[one]["prompt_logprobs"]) == ours[one]["prompt_token_count"] - 1
    skipped = written(*MEGATRON, "--skip-prompt-log-probs")
    assert [skipped[one]["prompt_logprobs"] for one in "012"] == [[]] * 3
    assert skipped["0"]["logprobs"] == skipped["0"]["generated_logprobs"]
    assert skipped["0"]["prompt_top_n_logprobs"] is skipped["0"]["top_n_logprobs"] is None


def test_the_best_tokens_by_their_texts(ours, theirs):
    for position, same in zip(theirs["0"]["top_n_logprobs"], ours["0"]["top_n_logprobs"], strict=True):
        assert sorted(position.values()) == pytest.approx(sorted(same.values()), abs=1e-5)
        assert not any(text.isdigit() for text in position)
    best = "".join(max(position, key=position.__getitem__) for position in theirs["0"]["top_n_logprobs"])
    assert theirs["0"]["generated_text"] in best, "greedy tokens are the best ones"


def test_counts_are_the_last_pass_s(ours, theirs):
    assert theirs["lifetime_prefill_token_count"] == ours["lifetime_prefill_token_count"]
    steps = {theirs[one]["step_count"] for one in "012"}
    assert steps == {max(ours[one]["step_count"] for one in "012")}


def test_events_are_told_by_the_wall_clock(theirs, written):
    kinds = [event["type"] for event in theirs["0"]["events"]]
    assert kinds == ["ADD_ENGINE", "ADD_CONTEXT", "FINISH"]
    assert all(event["timestamp"] > 1.7e9 for event in theirs["0"]["events"])
    tracked = written(*MEGATRON, "--output-request-events", f"{BATCHING}-track-generated-token-events")
    events = tracked["0"]["events"]
    tokens = [event["payload"]["token_id"] for event in events if event["type"] == "GENERATED_TOKEN"]
    assert tokens == tracked["0"]["generated_tokens"]
    times = [event["timestamp"] for event in events]
    assert times == sorted(times)


def test_tokens_are_tracked_in_our_format_too(written):
    events = written("--output-request-events", f"{BATCHING}-track-generated-token-events")["1"]["events"]
    assert [event["type"] for event in events][2:4] == ["FIRST_TOKEN", "GENERATED_TOKEN"]
    assert sum(event["type"] == "GENERATED_TOKEN" for event in events) == 8


@pytest.mark.parametrize("form", ["full", "megatron"])
def test_every_nth_result_and_the_last(written, form):
    """Results keep their ids; throughput counts all requests."""
    more = ("--output-format", form, "--inference-repeat-n", "2")
    every = written(*more, "--output-every-n-results", "2")
    ids = {key for key in every if key.isdigit()}
    assert ids == ({"0", "2"} if form == "megatron" else {"0", "2", "3", "5"})
    assert len(every["throughput"]) == 2


def test_throughput_alone_or_not_at_all(written):
    assert list(written("--throughput-check-only")) == ["throughput"]
    assert "throughput" not in written("--no-record-throughput")
    assert "throughput" not in written("--no-record-throughput", *MEGATRON)


def test_tokens_of_one_text_are_one_key(record):
    """The best of them counts."""
    best = ({1: -0.5, 2: -3.0, 3: -1.0},)
    one = record(generated_log_probs=(-0.5, -0.1), generated_top_n_log_probs=best, prompt_top_n_log_probs=None)
    results = build_megatron_results(
        [Pass((one,), 1.0, 7)], with_events=True, prompt_text=lambda _: "p", token_text=lambda token: "ab"[token // 3]
    )
    assert results["0"]["top_n_logprobs"] == [{"a": -0.5, "b": -1.0}]
    assert results["0"]["step_count"] == 7
    assert [event["timestamp"] for event in results["0"]["events"]] == [1e9, 1e9 + 1]
    assert Event(EventType.GENERATED_TOKEN, 0.0, {"token_id": 4}).to_dict()["payload"] == {"token_id": 4}
