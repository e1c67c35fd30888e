"""MR-1, MR-6, MR-7: the first of several ranks serves; it outlives silence, and ends with any of them."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

import pytest
import torch

from tests.unit_tests.parallel.test_failures import MINUTES, SHORT, be_patient, before_step, exit_codes, fail
from tests.unit_tests.support.ranks import Outcome, run_at_once, run_world

pytestmark = pytest.mark.worlds

ARGUMENTS = ["--port", "0", "--inference-dynamic-batching-block-count", "64", "--log-level", "warning"]


def run_server(arguments: Sequence[str], client: str, kind: str) -> None:
    """Command `serve` as torchrun starts it; on rank 0 a client comes when it listens."""
    from megatron_ext.commands.serve import main
    from megatron_ext.server import run

    be_patient(kind)
    rank = torch.distributed.get_rank()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(torch.distributed.get_world_size())}
    run.announce = lambda url: threading.Thread(target=CLIENTS[client], args=(url,), daemon=True).start()
    if rank == 1:
        HAPPENINGS[kind]()
    sys.exit(main([*ARGUMENTS, *arguments]))


def ask(url: str, prompt: str, count: int = 5) -> tuple[int, str]:
    body = {"model": "embedded", "prompt": prompt, "max_tokens": count, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def chat(url: str, silence: float = 0.0) -> None:
    """Two requests, and another one after so many seconds."""
    for seconds in (0.0, 0.0, silence):
        time.sleep(seconds)
        print("answer", *ask(url, "The quick brown fox"), flush=True)
    with urllib.request.urlopen(f"{url}/metrics", timeout=120) as answer:
        print("\n".join(line for line in answer.read().decode().splitlines() if "tokens_generated" in line), flush=True)
    stop()


def wait(url: str) -> None:
    print("answer", *ask(url, "The quick brown fox", 40), flush=True)


CLIENTS = {
    "chat": chat,
    "patient": lambda url: chat(url, 60 * MINUTES + 0.5),
    "wait": wait,
    "no client": lambda url: None,
}


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_start() -> None:
    """Exit in the first function after the ranks have met: this rank never connects in a group of Megatron's."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel = die


def die_when_ready() -> None:
    """Exit after loading, where a rank begins to wait for rank 0."""
    from megatron_ext.signals import Interruption

    Interruption.keep_quiet = die


HAPPENINGS = {
    "nothing": lambda: None,
    "fail": lambda: before_step(4, fail),
    "die at start": die_at_start,
    "die when ready": die_when_ready,
}


def said(outcomes: Sequence[Outcome]) -> list[str]:
    return [line for one in outcomes for line in one.stderr.splitlines() if line.startswith("megatron-ext serve:")]


@pytest.fixture(scope="module")
def ends() -> dict[str, list[Outcome]]:
    """Servers whose ranks wait, for each other or for a client."""
    sizes = ["--tensor-model-parallel-size", "2"]
    return run_at_once(
        {
            "TP 2": lambda: run_world(run_server, 2, [*sizes, *SHORT], "patient", "nothing"),
            "2 replicas": lambda: run_world(run_server, 2, [], "chat", "nothing"),
            "dies at start": lambda: run_world(run_server, 2, SHORT, "no client", "die at start"),
            "dies when ready": lambda: run_world(run_server, 2, SHORT, "no client", "die when ready"),
        }
    )


@pytest.mark.realtime
@pytest.mark.parametrize("name", ["TP 2", "2 replicas"])
def test_it_answers_and_outlives_silence(name: str, ends: dict[str, list[Outcome]]):
    """The silence with TP 2 is longer than a rank waits for another one; a signal to rank 0 ends all."""
    outcomes = ends[name]
    assert exit_codes(outcomes) == [0, 0], [one.describe() for one in outcomes]
    answers = [line for line in outcomes[0].stdout.splitlines() if line.startswith("answer")]
    assert len(answers) == 3
    assert answers[0].startswith("answer 200 ")
    assert len(set(answers)) == 1
    assert "tokens_generated_total 15.0" in outcomes[0].stdout
    assert outcomes[1].stdout == ""


def test_a_rank_that_raises_ends_the_server():
    """Waiting clients get a 500, nothing is retried, and the rank's own error message is the last line."""
    outcomes = run_world(run_server, 2, ["--tensor-model-parallel-size", "2"], "wait", "fail")
    assert exit_codes(outcomes) == [1, 1], [one.describe() for one in outcomes]
    assert said(outcomes) == ["megatron-ext serve: error: rank 1: ZeroDivisionError: planted in two lines"]


@pytest.mark.realtime
@pytest.mark.parametrize("name", ["dies at start", "dies when ready"])
def test_a_rank_that_dies_in_silence_ends_the_server(name: str, ends: dict[str, list[Outcome]]):
    """TE-3: the server also ends if the rank dies before it has connected, where the others wait as for a slow one."""
    outcomes = ends[name]
    assert exit_codes(outcomes) == [1, -signal.SIGKILL], [one.describe() for one in outcomes]
    assert said(outcomes) == ["megatron-ext serve: error: rank 1 ended without a message"]
