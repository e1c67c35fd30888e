"""MR-6: a rank that raises, hangs or is killed ends all of them, and its error is the only line printed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit_tests.support.ranks import Outcome, run_at_once, run_world

pytestmark = pytest.mark.worlds

PROMPTS = ["--prompts", *(f"number {i}" for i in range(4)), "--num-tokens-to-generate", "30"]
ENGINE = ["--inference-dynamic-batching-block-count", "64"]
MINUTES = 0.2  # a rank of a loaded machine may be silent for seconds, and is not lost
SHORT = ["--distributed-timeout-minutes", str(MINUTES)]


def run_tool(arguments: Sequence[str], rank: int, kind: str, step: int = 3) -> None:
    """Command `run` as torchrun starts it; something happens on one rank in one step."""
    given = [] if {"--prompt-file", "--prompts"} & set(arguments) else [*PROMPTS, *ENGINE]
    import torch

    be_patient(kind)
    own = torch.distributed.get_rank()
    os.environ |= {"RANK": str(own), "WORLD_SIZE": str(torch.distributed.get_world_size())}
    if own == rank:
        HAPPENINGS[kind](step)
    from megatron_ext.commands.run import main

    sys.exit(main([*given, *arguments]))


def be_patient(kind: str = "nothing") -> None:
    """Let this rank wait longer for the reports of others, which come late from a loaded machine, or not at all."""
    from megatron_ext.parallel import failure

    failure.PATIENCE = 10.0 if kind in WITHOUT_REPORT else 100.0


def before_step(step: int, happening) -> None:
    from megatron_ext.mcore.step_executor import StepExecutor

    compute, steps = StepExecutor.execute, []

    def compute_watched(self, message):
        steps.append(message)
        if len(steps) == step:
            happening()
        return compute(self, message)

    StepExecutor.execute = compute_watched


def fail() -> None:
    raise ZeroDivisionError("planted\nin two lines")


def hang() -> None:
    while True:
        time.sleep(0.1)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(number: int) -> None:
    os.kill(os.getpid(), number)


def refuse_to_load(_: int) -> None:
    from megatron_ext.errors import ConfigError
    from megatron_ext.models import engine_args

    def load(*_: object, **__: object) -> None:
        raise ConfigError("this disk has no such directory")

    engine_args.load_model = load


WITHOUT_REPORT = {"hang", "kill", "no directory", "die at start", "die when ready"}
HAPPENINGS = {
    "nothing": lambda _: None,
    "fail": lambda step: before_step(step, fail),
    "hang": lambda step: before_step(step, hang),
    "kill": lambda step: before_step(step, kill),
    "SIGINT": lambda step: before_step(step, lambda: interrupt(signal.SIGINT)),
    "SIGTERM": lambda step: before_step(step, lambda: interrupt(signal.SIGTERM)),
    "no directory": refuse_to_load,
}


def said(outcomes: Sequence[Outcome]) -> list[str]:
    """Error lines of all ranks."""
    return [line for one in outcomes for line in one.stderr.splitlines() if line.startswith("megatron-ext run:")]


def exit_codes(outcomes: Sequence[Outcome]) -> list[int]:
    return [one.exit_code for one in outcomes]


@pytest.fixture(scope="module")
def waiting_worlds() -> dict[str, list[Outcome]]:
    """Outcomes of worlds in which ranks wait for a message from one rank."""
    return run_at_once(
        {
            "hang": lambda: run_world(run_tool, 3, SHORT, 1, "hang", grace=10.0),
            "kill": lambda: run_world(run_tool, 3, [], 1, "kill"),
            "no directory": lambda: run_world(run_tool, 2, [], 1, "no directory"),
        }
    )


@pytest.mark.parametrize(("size", "rank"), [(3, 2), (2, 0)])
def test_a_rank_that_raises(size, rank):
    outcomes = run_world(run_tool, size, [], rank, "fail")
    assert exit_codes(outcomes) == [1] * size, [one.describe() for one in outcomes]
    assert said(outcomes) == [f"megatron-ext run: error: rank {rank}: ZeroDivisionError: planted in two lines"]
    assert not any(one.was_killed for one in outcomes)


@pytest.mark.realtime
def test_a_rank_that_hangs(waiting_worlds):
    outcomes = waiting_worlds["hang"]
    assert [one.exit_code for one in outcomes if one.rank != 1] == [1, 1], [one.describe() for one in outcomes]
    assert outcomes[1].was_killed
    words = f"rank 1 did not answer within {MINUTES} minutes (--distributed-timeout-minutes)"
    assert said(outcomes) == [f"megatron-ext run: error: {words}"]


@pytest.mark.realtime
def test_a_rank_that_is_killed(waiting_worlds):
    outcomes = waiting_worlds["kill"]
    assert exit_codes(outcomes) == [1, -signal.SIGKILL, 1]
    assert said(outcomes) == ["megatron-ext run: error: rank 1 ended without a message"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--load", "/no/such/directory"], "--load /no/such/directory does not exist"),  # all see it
        (["--temperature", "-1"], "temperature -1"),  # before there are groups
        (["--batch-boundaries", "9", "--drain-between-batches"], "--batch-boundaries 9"),  # rank 0 sees it
    ],
)
def test_a_mistake_is_said_once(arguments, words):
    outcomes = run_world(run_tool, 2, arguments, 0, "nothing")
    assert exit_codes(outcomes) == [2, 2], [one.describe() for one in outcomes]
    (line,) = said(outcomes)
    assert line.startswith(f"megatron-ext run: error: {words}")
    assert line in outcomes[0].stderr


@pytest.mark.realtime
def test_a_mistake_that_one_rank_sees(waiting_worlds):
    outcomes = waiting_worlds["no directory"]
    assert exit_codes(outcomes) == [2, 2], [one.describe() for one in outcomes]
    assert said(outcomes) == ["megatron-ext run: error: rank 1: this disk has no such directory"]


def test_a_terminals_signal_is_rank_zeros_affair(tmp_path: Path):
    """Others go on, after a launcher's SIGTERM, too; rank 0 ends requests and writes them, and the others follow."""
    path = tmp_path / "out.json"
    ends = run_at_once(
        {number: lambda number=number: run_world(run_tool, 2, [], 1, number) for number in ("SIGINT", "SIGTERM")}
        | {"of rank 0": lambda: run_world(run_tool, 2, ["--output-path", str(path)], 0, "SIGINT")}
    )
    for number in ("SIGINT", "SIGTERM"):
        assert exit_codes(ends[number]) == [0, 0], [one.describe() for one in ends[number]]
    outcomes = ends["of rank 0"]
    assert exit_codes(outcomes) == [130, 0], [one.describe() for one in outcomes]
    (line,) = said(outcomes)
    assert line.startswith("megatron-ext run: SIGINT: requests: 4 aborted")
    written = json.loads(path.read_text())
    assert [written[str(i)]["status"] for i in range(4)] == ["ABORTED"] * 4
    assert all(written[str(i)]["generated_tokens"] for i in range(4))


def test_nothing_is_left_half_written(tmp_path: Path):
    outcomes = run_world(run_tool, 2, ["--output-path", str(tmp_path / "out.json")], 1, "fail", 20)
    assert exit_codes(outcomes) == [1, 1]
    assert not (tmp_path / "out.json").exists()
    for left in tmp_path.iterdir():  # whole lines of requests that had ended
        assert all(json.loads(line) for line in left.read_text().splitlines())


def test_without_a_store_one_rank_speaks(monkeypatch: pytest.MonkeyPatch):
    """Rank 0 keeps the store without torchrun: when it is gone, the ranks cannot agree on a reporter."""
    import torch.distributed as dist

    from megatron_ext.errors import RankError
    from megatron_ext.parallel import failure

    def refuse(*_: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    class Gone(failure.RankRegistry):
        sign = claim = claimed = refuse

    def said_by(rank: int, error: Exception) -> str:
        monkeypatch.setattr(failure, "_registry", lambda: Gone(dist.HashStore(), rank, 3))
        monkeypatch.setattr(failure, "_is_alone", lambda: False)
        with pytest.raises(RankError) as caught, failure.ending_together(1.0):
            raise error
        return str(caught.value)

    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:10")
    assert "rank 0" in said_by(1, lost)
    assert said_by(2, lost) == ""
    assert said_by(2, KeyError("own")) == "rank 2: KeyError: 'own'"


@pytest.mark.parametrize("error", ["Wait timeout after 3000ms for keys: /1", "Timed out waiting for recv operation"])
@pytest.mark.parametrize(
    ("process", "words"), [("ended", "rank 1 ended without a message"), ("runs", "ranks 1, 2 did not answer within")]
)
def test_a_process_that_has_ended_is_not_called_silent(error, process, words, monkeypatch: pytest.MonkeyPatch):
    """TE-3: the process decides, not the exception: a rank that dies before it has connected looks silent to others."""
    import torch.distributed as dist

    from megatron_ext.errors import RankError
    from megatron_ext.parallel import failure

    store = dist.HashStore()
    boards = [failure.RankRegistry(store, rank, 3) for rank in range(3)]
    boards[2].sign_in()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        monkeypatch.setattr(failure.os, "getpid", lambda: child.pid)
        boards[1].sign_in()
        if process == "ended":
            child.communicate(b"\n")
        monkeypatch.setattr(failure, "_registry", lambda: boards[0])
        monkeypatch.setattr(failure, "_is_alone", lambda: False)
        monkeypatch.setattr(failure, "PATIENCE", 0.0)
        with pytest.raises(RankError) as caught, failure.ending_together(0.05):
            raise RuntimeError(error)
        assert str(caught.value).startswith(words)
