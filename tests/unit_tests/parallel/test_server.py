"""MR-1, MR-6, MR-7: the first of several ranks serves; it outlives silence, and ends with any of them."""

from __future__ import annotations

import dataclasses
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

from megatron_ext.mcore import platform
from megatron_ext.models.build import build_model
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from tests.priority import TestPriority
from tests.unit_tests.parallel.test_failures import MINUTES, SHORT, be_patient, before_step, exit_codes, fail, hang
from tests.unit_tests.server.test_megatron_server import CONFIG, RUN_C
from tests.unit_tests.support.ranks import Outcome, run_at_once, run_world

pytestmark = [pytest.mark.worlds, pytest.mark.priority(TestPriority.HIGH)]

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


def send_ids(url: str) -> None:
    body = {"model": "model", "prompt": list(range(1, 40)), "max_tokens": 5, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=120) as answer:
        print("answer", answer.status, json.loads(answer.read())["usage"]["completion_tokens"], flush=True)
    stop()


def ask_often(url: str) -> None:
    """A long prompt, twice: how much of it was cached."""
    body = {"model": "embedded", "prompt": "The import statement loads a module. " * 40, "max_tokens": 3}
    for _ in range(2):
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body | {"temperature": 0}).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=120) as answer:
            found = json.loads(answer.read())
        print("answer", found["usage"]["prompt_tokens_details"]["cached_tokens"], repr(found["choices"][0]["text"]))
    stop()


def wait(url: str) -> None:
    print("answer", *ask(url, "The quick brown fox", 40), flush=True)


def ask_beside_a_stream(url: str) -> None:
    """A prompt of many steps, while another request decodes."""
    body = {"model": "embedded", "prompt": "The quick", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body | {"stream": True}).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=120) as stream:
        stream.readline()
        print("answer", *ask(url, "The import statement loads a module. " * 40), flush=True)
        print("end", stream.read().split()[-1].decode(), flush=True)
    stop()


CLIENTS = {
    "chat": chat,
    "patient": lambda url: chat(url, 60 * MINUTES + 0.5),
    "wait": wait,
    "ids": send_ids,
    "often": ask_often,
    "beside": ask_beside_a_stream,
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
    "hang": lambda: before_step(4, hang),
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
            "hangs": lambda: run_world(run_server, 2, [*sizes, *SHORT], "wait", "hang", grace=1.0),
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


def test_a_long_prompt_beside_a_stream():
    """SC-4: all ranks bound its steps alike."""
    outcomes = run_world(run_server, 2, ["--tensor-model-parallel-size", "2"], "beside", "nothing")
    assert exit_codes(outcomes) == [0, 0], [one.describe() for one in outcomes]
    answer, end = outcomes[0].stdout.splitlines()[-2:]
    assert answer.startswith("answer 200 ")
    assert end == "end [DONE]"


def test_a_rank_that_raises_ends_the_server():
    """Waiting clients get a 500, nothing is retried, and the rank's own error message is the last line."""
    outcomes = run_world(run_server, 2, ["--tensor-model-parallel-size", "2"], "wait", "fail")
    assert exit_codes(outcomes) == [1, 1], [one.describe() for one in outcomes]
    assert said(outcomes) == ["megatron-ext serve: error: rank 1: ZeroDivisionError: planted in two lines"]


@pytest.mark.realtime
def test_a_rank_that_hangs_ends_the_server(ends: dict[str, list[Outcome]]):
    outcomes = ends["hangs"]
    assert outcomes[0].exit_code == 1, outcomes[0].describe()
    words = f"rank 1 did not answer within {MINUTES} minutes (--distributed-timeout-minutes)"
    assert said(outcomes) == [f"megatron-ext serve: error: {words}"]


@pytest.mark.realtime
@pytest.mark.parametrize("name", ["dies at start", "dies when ready"])
def test_a_rank_that_dies_in_silence_ends_the_server(name: str, ends: dict[str, list[Outcome]]):
    """TE-3: the server also ends if the rank dies before it has connected, where the others wait as for a slow one."""
    outcomes = ends[name]
    assert exit_codes(outcomes) == [1, -signal.SIGKILL], [one.describe() for one in outcomes]
    assert said(outcomes) == ["megatron-ext serve: error: rank 1 ended without a message"]


def test_megatrons_own_launch_line(tmp_path):
    """MF-3: run C with experts, at the sizes of two ranks: tensor parallel 2, experts on both, none of them split."""
    root = tmp_path / "model"
    platform.initialize()
    experts = {"hybrid_override_pattern": "M-ME*-", "num_experts": 4, "moe_ffn_hidden_size": 16, "moe_router_topk": 2}
    config = dataclasses.replace(CONFIG, vocab_size=97, **experts)
    save_dist_checkpoint(root, build_model(config, device=torch.device("cpu"), seed=3), config)
    sizes = {"--tensor-model-parallel-size: 1": ": 2", "--expert-model-parallel-size: 1": ": 2"}
    flags = "".join(line for line in f"{RUN_C}--load: {root}".splitlines(True) if "-buffer-size-gb" not in line)
    for one, other in sizes.items():
        assert one in flags
        flags = flags.replace(one, one.removesuffix(": 1") + other)
    pairs = [line.partition(": ") for line in flags.split("\n") if line]
    words = [word for name, _, value in pairs for word in ([name] if value == "true" else [name, value])]
    outcomes = run_world(run_server, 2, words, "ids", "nothing")
    assert exit_codes(outcomes) == [0, 0], said(outcomes)
    assert [line for line in outcomes[0].stdout.splitlines() if line.startswith("answer")] == ["answer 200 5"]
    assert "--sequence-parallel" in outcomes[0].stderr


def test_a_restarted_server_skips_what_it_skipped_before(tmp_path):
    """DC-1, DC-4: two ranks, stopped by SIGTERM and started again by the same command."""
    flags = ["--tensor-model-parallel-size", "2", "--prefix-cache-dir", str(tmp_path / "cache")]
    lives = [run_world(run_server, 2, flags, "often", "nothing") for _ in range(2)]
    answers = [
        [line.split(" ", 2)[1:] for line in first.stdout.splitlines() if line.startswith("answer")]
        for first, _ in lives
    ]
    assert [exit_codes(life) for life in lives] == [[0, 0]] * 2, lives[0][0].describe()
    (cold, warm), (restarted, _) = answers
    assert int(cold[0]) == 0 < int(warm[0])
    assert restarted == warm
    assert warm[1] == cold[1]
