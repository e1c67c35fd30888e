"""The tool from end to end: the same tokens as the command `run`, the ready line, mistakes, and the way out."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from arguments import parse_server_arguments
from megatron_ext.commands import run, serve
from megatron_ext.config import RequestParams, ServerConfig, SourceConfig
from megatron_ext.console.start import PHASES
from megatron_ext.mcore import platform
from megatron_ext.offline.prompts import example_prompts
from megatron_ext.server.run import build_serving, model_name
from tests.on_request import long_except
from tests.unit_tests.support.held_server import HeldServer
from tests.unit_tests.support.server import PATIENCE, LiveServer, read_all

TINY = """
--hybrid-override-pattern M-*- --hidden-size 32 --num-attention-heads 2 --mamba-head-dim 16 --mamba-state-dim 16
--mamba-num-groups 1 --tokenizer-type NullTokenizer --vocab-size 64 --inference-dynamic-batching-block-count 64
--inference-dynamic-batching-block-size 16 --inference-dynamic-batching-max-requests 4 --seed 7
""".split()
TOKENS = 12
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


LINES = {
    "tiny": [
        {"token_ids": [5] * 40},
        {"token_ids": [5] * 40 + [6]},
        {"token_ids": [9, 8, 7], "temperature": 1.0, "top_k": 9, "seed": 3},
    ],
    "embedded": [{"text": prompt.content} for prompt in example_prompts(RequestParams())[:2]],
}
FLAGS = {"tiny": TINY, "embedded": ["--inference-dynamic-batching-block-count", "400"]}


@pytest.fixture(scope="module", params=list(LINES))
def both(request, tmp_path_factory) -> Iterator[tuple[list[dict], list[dict], LiveServer]]:
    """Prompts, what the command `run` made of them, and a server with the same flags."""
    lines, flags = LINES[request.param], FLAGS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    files = ["--prompt-file", str(folder / "prompts.jsonl"), "--output-path", str(folder / "out.json")]
    sampling = ["--return-log-probs", "--skip-prompt-log-probs", "--num-tokens-to-generate", str(TOKENS)]
    assert run.main([*flags, *files, *sampling]) == run.DONE
    results = json.loads((folder / "out.json").read_text())
    platform.initialize()
    served = ["--served-model-name", "both", "--shutdown-timeout", "5"]
    server = LiveServer(build_serving(parse_server_arguments([*flags, *served])))
    yield lines, [results[str(i)] for i in range(len(lines))], server
    server.stop()


@pytest.mark.parametrize("stream", long_except([True], [False, True]), ids=["whole", "streamed"])
def test_tokens_are_those_of_a_run(both, stream):
    """KV-8: text and log-probs of both tools are the same, with the cache cold and warm."""
    for line, expected in zip(*both[:2], strict=True):
        sampling = {name: line[name] for name in ("top_k", "seed") if name in line}
        for _ in range(2):
            answer = (
                both[2]
                .client()
                .completions.create(
                    model="both",
                    prompt=line.get("token_ids", line.get("text")),
                    max_tokens=TOKENS,
                    temperature=line.get("temperature", 0),
                    logprobs=0,
                    stream=stream,
                    extra_body=sampling,
                )
            )
            parts = list(answer) if stream else [answer]
            assert "".join(part.choices[0].text for part in parts) == expected["generated_text"]
            scores = [score for part in parts for score in part.choices[0].logprobs.token_logprobs]
            assert scores == pytest.approx(expected["generated_logprobs"], abs=1e-3)
    assert both[2].metric("prompt_tokens_skipped_total") > 0


@contextlib.contextmanager
def started(folder: Path, requests: int | None = None) -> Iterator[tuple[HeldServer, str]]:
    """The tool in a process of its own, and its URL; see `held_server`."""
    patient = ["--shutdown-timeout", str(PATIENCE), "--header-timeout", str(PATIENCE)]
    place = ["--host", "127.0.0.7", "--port", "0"]  # where no other process takes the port of one that has ended
    server = HeldServer(folder, [*TINY, *place, *patient], requests)
    try:
        yield server, server.printed(r"\nready: (\S+)\n")[1]
    finally:
        server.process.kill()
        server.process.join()


class TestProcess:
    def test_ready_then_a_signal_lets_the_running_request_finish(self, tmp_path):
        """EX-6: sizes are printed; the exit code after a signal is 0. The log says what happened, and when."""
        with started(tmp_path) as (server, url):
            assert server.printed("64 blocks of 16 tokens")
            assert httpx.get(f"{url}/health", timeout=PATIENCE).json()["status"] == "ok"
            body = {"prompt": [1, 2], "max_tokens": 40, "stream": True, "stream_options": {"include_usage": True}}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as response:
                events = response.iter_lines()
                next(events)
                server.signal(signal.SIGTERM)
                server.logged("shutdown begins")
                server.release()
                rest = [line for line in events if line]
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 40
            log = server.log_of_the_end()
        assert "Traceback" not in log
        time = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO megatron_ext\.server\.\w+: "
        assert re.findall(r"start: start: (\w+)", log) == [*PHASES, "ready"]
        for line in (
            r"shutdown begins: 1 requests",
            r"cmpl-\w+ POST .* generated=40 ",
            r"shutdown ends: 1 requests fin",
        ):
            assert re.search(time + line, log, re.MULTILINE), log
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")

    def test_a_second_signal_ends_every_request_with_an_error(self, tmp_path):
        """4 streams, 5 requests that wait for a place in the batch, 2 without their bodies and 1 without its head."""
        with started(tmp_path, requests=4) as (server, url), contextlib.ExitStack() as stack:

            def send(count: int, said: str) -> list[socket.socket]:
                address = httpx.URL(url).host, httpx.URL(url).port
                clients = [stack.enter_context(socket.create_connection(address, PATIENCE)) for _ in range(count)]
                for client in clients:
                    client.sendall(said.encode())
                return clients

            def request(**fields: object) -> str:
                content = json.dumps({"prompt": [1, 2], "max_tokens": 100, "ignore_eos": True} | fields)
                return f"{HEAD}Content-Length: {len(content)}\r\n\r\n{content}"

            streams = send(4, request(stream=True))
            said = [client.recv(65536) for client in streams]
            waiting = send(3, request()) + send(1, request(stream=True)) + send(1, request(n=2))
            while httpx.get(f"{url}/load", timeout=PATIENCE).json()["server_load"] < 10:
                pass
            bodiless = send(2, f"{HEAD}Expect: 100-continue\r\nContent-Length: 9\r\n\r\n")
            assert [client.recv(65536)[:13] for client in bodiless] == [b"HTTP/1.1 100 "] * 2
            (headless,) = send(1, HEAD)
            assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200  # so all have been read
            server.signal(signal.SIGINT)
            server.logged("shutdown begins: 11 requests in flight")
            server.signal(signal.SIGINT)
            server.logged("a second signal: 11 requests")
            server.signal(signal.SIGINT)
            for client, start in zip(streams, said, strict=True):
                events = (start + read_all(client)).split(b"\r\n\r\n", 1)
                assert events[0].startswith(b"HTTP/1.1 200 ")
                assert b"shutting down" in events[1]
                assert events[1].endswith(b"\r\n0\r\n\r\n")
            for client in (*waiting, *bodiless, headless):
                answer = read_all(client)
                assert answer.startswith(b"HTTP/1.1 503 "), answer
                assert b"the server is shutting down" in answer
            server.release()
            log = server.log_of_the_end()
        assert "Traceback" not in log
        assert log.count("a second signal") == 1
        assert "shutdown ends: 0 requests finished, 11 cancelled" in log


class TestMistakes:
    @pytest.fixture
    def error_line(self, capfd):
        def fail(*argv: str) -> str:
            assert serve.main(argv) == 2
            captured = capfd.readouterr()
            (line,) = captured.err.splitlines()
            assert captured.out == ""
            assert line.startswith("megatron-ext serve: error: ")
            return line

        return fail

    def test_flags(self, error_line):
        assert "--port 70000" in error_line("--port", "70000")
        assert "--prompts" in error_line("--prompts", "a")
        assert "--load x --load-hf y" in error_line("--load", "x", "--load-hf", "y").replace(" and", "")
        assert "9 attention heads" in error_line("--num-attention-heads", "9")

    def test_a_port_that_is_taken_is_told_before_anything_is_loaded(self, error_line, monkeypatch):
        monkeypatch.setattr("megatron_ext.models.engine_args.load_model", None)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            assert f"--port {port}" in error_line("--port", str(port))

    def test_too_few_files_are_told_before_anything_is_loaded(self, error_line, monkeypatch):
        monkeypatch.setattr("megatron_ext.models.engine_args.load_model", None)
        limits_of = resource.getrlimit
        few = (70, 70)
        monkeypatch.setattr("resource.getrlimit", lambda of: few if of == resource.RLIMIT_NOFILE else limits_of(of))
        assert "`ulimit -n` is 70" in error_line("--port", "0")


@pytest.mark.parametrize(
    ("source", "server", "name"),
    [
        (SourceConfig(), ServerConfig(), "embedded"),
        (SourceConfig(load_hf="/models/Llama-8B/"), ServerConfig(), "Llama-8B"),
        (SourceConfig(load="runs/three"), ServerConfig(), "three"),
        (SourceConfig(load="runs/three"), ServerConfig(served_model_name=("mine", "other")), "mine"),
    ],
)
def test_the_name_of_a_model(source, server, name):
    assert model_name(source, server, "embedded" if source.load is None else source.load) == name


def test_a_dry_run_serves_nothing(capsys, monkeypatch):
    monkeypatch.setattr("megatron_ext.server.run._listen_and_serve", None)
    assert serve.main(["--dry-run"]) == serve.STOPPED
    assert "at once, 4,096 tokens" in capsys.readouterr().out
