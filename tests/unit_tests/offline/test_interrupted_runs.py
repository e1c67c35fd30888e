"""SE-4, Ctrl-C and SIGTERM: finished results are kept, the rest ends as aborted, and one line reports it."""

from __future__ import annotations

import json
import math
import signal
import threading
from pathlib import Path

import pytest

from megatron_ext import signals
from megatron_ext.commands.run import main
from megatron_ext.config import RequestParams, RunConfig
from megatron_ext.engine.client import EngineClient
from megatron_ext.models import engine_args
from megatron_ext.offline import run as offline
from megatron_ext.offline.passes import run_passes
from megatron_ext.prefix_cache.disk.entry_files import EntryFiles
from megatron_ext.scheduling.record import Status
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.signals import Interruption
from tests.unit_tests.support.holding import PATIENCE

TINY = """
--hybrid-override-pattern M-*- --hidden-size 32 --num-attention-heads 2 --mamba-head-dim 16 --mamba-state-dim 16
--mamba-num-groups 1 --tokenizer-type NullTokenizer --vocab-size 64 --inference-dynamic-batching-block-count 8
--inference-dynamic-batching-max-requests 4
""".split()
PROMPTS = [RequestInputs((1, 2, 3), RequestParams())] * 4
DONE, ABORTED = Status.COMPLETED, Status.ABORTED


class TestSubmission:
    """Every request has its record, whenever the run is stopped."""

    def stopped_after(self, engine, steps: int, **settings):
        passes = run_passes(
            engine, PROMPTS, RunConfig(**settings), lambda _: None, lambda: engine.log.count("step") >= steps
        )
        return [[record.status for record in one.records] for one in passes], passes

    def test_those_not_yet_submitted_have_records_too(self, fake_engine):
        (statuses,), (one,) = self.stopped_after(fake_engine, 2, incoming_requests_per_step=1)
        assert statuses == [DONE, ABORTED, ABORTED, ABORTED]
        assert [record.ttft for record in one.records] == [0.5, 0.5, None, None]
        assert fake_engine.log[-6:] == ["abort 1", "add 2", "abort 2", "add 3", "abort 3", "step"]

    def test_repeats_to_come_have_them_too(self, fake_engine):
        statuses, passes = self.stopped_after(fake_engine, 3, inference_repeat_n=3)
        assert statuses == [[DONE] * 4, [ABORTED] * 4, [ABORTED] * 4]
        assert [record.request_id for one in passes for record in one.records] == list(range(12))
        assert passes[1].throughput > 0
        assert passes[2].throughput == 0.0


@pytest.fixture
def prompt_file(tmp_path) -> str:
    """Two short requests and two long ones, of which the last waits for the second to end: three run at a time."""
    path = tmp_path / "prompts.jsonl"
    lengths = (2, 2, 40, 40)
    lines = [{"token_ids": [i + 1, 2, 3], "num_tokens_to_generate": n} for i, n in enumerate(lengths)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def interrupt(monkeypatch):
    """A function: the engine's n-th step sends signals while it runs."""

    def at(step: int, *numbers: int) -> None:
        monkeypatch.setattr(signals, "ONE_WISH", math.inf)  # however slow the machine is
        take_step, count = EngineClient.step, [0]

        def step_and_signal(engine):
            count[0] += 1
            if count[0] == step:
                for number in numbers:
                    signal.raise_signal(number)
            return take_step(engine)

        monkeypatch.setattr(EngineClient, "step", step_and_signal)

    return at


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"])
def test_the_json_has_everything(prompt_file, tmp_path, capfd, interrupt, number, code):
    """Several signals within `ONE_WISH` count as one. The step that runs is finished, so no token is lost."""
    interrupt(10, number, signal.SIGTERM, signal.SIGINT)
    output = tmp_path / "out.json"
    argv = [
        "--prompt-file",
        prompt_file,
        "--output-path",
        str(output),
        "--output-request-events",
        "--output-format",
        "full",
    ]
    assert main([*TINY, *argv, "--incoming-requests-per-step", "1", "--inference-repeat-n", "2"]) == code
    captured = capfd.readouterr()
    (line,) = [line for line in captured.err.splitlines() if line.startswith("megatron-ext run")]
    name = signal.Signals(number).name
    assert line == f"megatron-ext run: {name}: requests: 2 completed, 6 aborted; all are in {output}"
    assert "tokens/s" not in captured.out, "what is in the file is not printed too"
    results = json.loads(output.read_text())
    requests = [results[str(i)] for i in range(8)]
    assert [one["status"] for one in requests] == ["COMPLETED"] * 2 + ["ABORTED"] * 6
    assert [len(one["generated_tokens"]) for one in requests] == [2, 2, 8, 7, 0, 0, 0, 0]
    assert all(one["ttft"] is None and one["input_prompt"] and one["error"] is None for one in requests[4:])
    assert all(0 < one["ttft"] <= one["latency"] for one in requests[:4])
    assert results["prefix_cache"]["blocks_in_use"] == 0
    assert len(results["throughput"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "prompts.jsonl"]


@pytest.mark.parametrize("place", ["load_model", "build_engine", "tokenize_prompts"])
def test_before_the_first_request(prompt_file, tmp_path, capfd, monkeypatch, place):
    owner = offline if place == "tokenize_prompts" else engine_args
    right = getattr(owner, place)

    def signal_and_go_on(*args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        return right(*args, **kwargs)

    monkeypatch.setattr(owner, place, signal_and_go_on)
    output = tmp_path / "out.json"
    assert main([*TINY, "--prompt-file", prompt_file, "--output-path", str(output)]) == 143
    assert capfd.readouterr().err == "megatron-ext run: SIGTERM: nothing has run\n"
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_a_crash_loses_what_was_in_flight_only(prompt_file, tmp_path, monkeypatch, caplog):
    take_step, count = EngineClient.step, [0]

    def crash(engine):
        count[0] += 1
        if count[0] == 10:
            raise RuntimeError("broken")
        return take_step(engine)

    output = tmp_path / "out.json"
    argv = [*TINY, "--prompt-file", prompt_file, "--output-path", str(output)]
    with monkeypatch.context() as patched:
        patched.setattr(EngineClient, "step", crash)
        with pytest.raises(RuntimeError, match="broken"):
            main(argv)
    assert not output.exists()
    assert caplog.messages[-1] == f"{output}.partial.jsonl has the finished requests"
    lines = [json.loads(line) for line in Path(f"{output}.partial.jsonl").read_text().splitlines()]
    assert main(argv) == 0
    results = json.loads(output.read_text())
    assert [line["request_id"] for line in lines] == [0, 1]
    for line in lines:
        whole = results[str(line["request_id"])]
        assert [*list(line)[1:], "step_count", "cuda_graph_request_count_map"] == list(whole)
        assert line["generated_tokens"] == whole["generated_tokens"]
    assert not Path(f"{output}.partial.jsonl").exists()


@pytest.mark.parametrize(("count", "is_cut_short"), [(1, False), (2, True)])
def test_a_second_signal_while_the_cache_is_written(
    prompt_file, tmp_path, capfd, monkeypatch, count: int, is_cut_short: bool
):
    """DC-1, SE-4: entries left out are counted, and the results are written all the same."""
    monkeypatch.setattr(signals, "ONE_WISH", 0.0)
    write, notice, left, handled = EntryFiles.write, Interruption._notice, [count], threading.Semaphore(0)

    def write_and_signal(*arguments: object) -> bool:
        if left[0]:
            left[0] -= 1
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # so that it ends no wait of the main thread
            assert handled.acquire(timeout=PATIENCE)
        return write(*arguments)

    def notice_and_tell(*arguments: object) -> None:
        notice(*arguments)
        handled.release()

    monkeypatch.setattr(Interruption, "_notice", notice_and_tell)

    monkeypatch.setattr(EntryFiles, "write", write_and_signal)
    output, cache = tmp_path / "out.json", ["--prefix-cache-dir", str(tmp_path / "cache")]
    cache += ["--prefix-cache-drain-seconds", "600"]
    small = ["--inference-dynamic-batching-block-size", "16", "--inference-dynamic-batching-block-count", "80"]
    argv = ["--prompt-file", prompt_file, "--output-path", str(output), "--output-format", "full"]
    assert main([*TINY, *small, *cache, *argv]) == 143
    results = json.loads(output.read_text())
    assert [results[key]["status"] for key in "0123"] == ["COMPLETED"] * 4
    counts = results["prefix_cache_disk"]
    assert counts["written"] > 0
    assert (counts["left_out"] > 0) == is_cut_short
    assert str(output) in capfd.readouterr().err
