"""OB-2: benchmark of a local model or of any server: its requests, their times, and the figures of the answers."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from benchmarks.serving.__main__ import main
from benchmarks.serving.clients import AskError, PendingOutput
from benchmarks.serving.figures import figures, percentile
from benchmarks.serving.load import Pace, serve
from benchmarks.serving.page import page
from benchmarks.serving.work import KINDS, Shape, dialogues
from megatron_ext.config import ServerConfig
from megatron_ext.server.serving import Serving
from megatron_ext.text.tokenizer import NullTokenizer
from tests.unit_tests.support.server import LiveServer, tiny_engine

SMALL = Shape(requests=8, prefix=20, prefixes=2, own=6, turns=4, generated=3)


class Echo:
    """Client that answers after a few turns of the event loop and counts concurrent requests."""

    name = "echo"

    def __init__(self, fails_at: int | None = None) -> None:
        self.prompts: list[str] = []
        self.living = self.most = 0
        self._fails_at = fails_at

    async def ask(self, prompt: str, count: int, answer: PendingOutput) -> None:
        self.prompts.append(prompt)
        number = len(self.prompts)
        self.living += 1
        self.most = max(self.most, self.living)
        for _ in range(5):
            await asyncio.sleep(0)
        self.living -= 1
        if number == self._fails_at:
            raise AskError("no")
        answer.text = f"answer {number}"
        answer.arrivals = [1.0, 2.0]

    async def close(self) -> None:
        pass


def ask(client: Echo, kind: str, pace: Pace) -> list[PendingOutput]:
    return asyncio.run(serve(client, kind, dialogues(kind, SMALL), SMALL.generated, pace))[0]


class TestWork:
    def test_what_is_shared(self):
        prompts = [one.turns[0].split() for one in dialogues("shared", SMALL)]
        assert {len(prompt) for prompt in prompts} == {26}
        assert len({tuple(prompt[:20]) for prompt in prompts}) == 2
        assert len({tuple(prompt[20:]) for prompt in prompts}) == 8
        unique = [one.turns[0].split() for one in dialogues("unique", SMALL)]
        assert len({tuple(prompt[:6]) for prompt in unique}) == 8

    def test_the_same_for_everybody_who_is_measured(self):
        for kind in KINDS:
            assert dialogues(kind, SMALL) == dialogues(kind, SMALL)
            assert dialogues(kind, SMALL) != dialogues(kind, Shape(**(vars(SMALL) | {"seed": 2})))

    def test_a_turn_begins_with_all_that_was_said(self):
        """The answer, too."""
        client = Echo()
        answers = ask(client, "chats", Pace(concurrency=1))
        assert len(answers) == 8
        for before, prompt, answer in zip(client.prompts, client.prompts[1:], answers, strict=False):
            assert prompt.startswith(f"{before} {answer.text} ") or len(prompt.split()) == SMALL.own

    def test_numbers(self):
        (first, *_) = dialogues("unique", Shape(numbers=50, requests=2))
        assert all(0 <= int(word) < 50 for word in first.turns[0].split())


class TestPace:
    @pytest.mark.parametrize("concurrency", [1, 3, 20])
    def test_so_many_at_once(self, concurrency):
        client = Echo()
        assert len(ask(client, "shared", Pace(concurrency=concurrency))) == 8
        assert client.most == min(concurrency, 8)

    def test_at_a_rate_nobody_waits_for_others(self):
        """All are in flight before the first is answered, where they come fast."""
        client = Echo()
        ask(client, "unique", Pace(rate=1e9))
        assert client.most > 1
        assert len(client.prompts) == 8

    def test_a_conversation_ends_where_it_fails(self):
        answers = ask(Echo(fails_at=2), "chats", Pace(concurrency=1))
        assert [one.error for one in answers] == [None, "no", None, None, None, None]


class TestFigures:
    def test_percentiles(self):
        values = [float(value) for value in range(1, 101)]
        assert [percentile(values, percent) for percent in (0, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
        assert [percentile([7.0], percent) for percent in (1, 99)] == [7, 7]
        assert percentile([], 50) is None

    def test_of_known_answers(self):
        """Failed answers are counted and excluded from all other figures."""
        good = [
            PendingOutput("a", 10.0, [10.1, 10.2, 10.4], 10.5, "x", 100, 60, 3),
            PendingOutput("a", 20.0, [20.3], 20.4, "x", 100, None, 1),
        ]
        bad = PendingOutput("a", 30.0, [30.1], 90.0, "x", 7, 7, 7, "no")
        told = figures([*good, bad], 2.0)
        assert (told["requests"], told["failed"], told["errors"]) == (2, 1, {"no": 1})
        assert (told["prompt_tokens"], told["generated_tokens"], told["skipped_share"]) == (200, 4, 0.6)
        assert (told["generated_per_second"], told["requests_per_second"]) == (2.0, 1.0)
        assert told["ttft_ms"] == {"p50": 100.0, "p90": 300.0, "p99": 300.0, "mean": 200.0, "max": 300.0}
        assert told["inter_token_ms"]["max"] == 200.0
        assert told["end_to_end_ms"]["p50"] == 400.0

    def test_of_nothing(self):
        told = figures([], 1.0)
        assert (told["skipped_share"], told["ttft_ms"]["p50"]) == (None, None)
        assert "<svg" in page("nothing", {"a": []}, {"a": told})


@pytest.fixture(scope="module")
def server() -> LiveServer:
    engine = tiny_engine(tokenizer=NullTokenizer(97))
    live = LiveServer(Serving(engine, "tiny", ServerConfig(api_key="secret", shutdown_timeout=1.0)))
    yield live
    live.stop()


def test_of_a_server(server, tmp_path, monkeypatch, capsys):
    """Counts are the server's own, and the page has all that it shows in it."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    files = [str(tmp_path / name) for name in ("figures.json", "page.html")]
    small = "--requests 6 --prefix 20 --own 6 --generate 4 --concurrency 3 --numbers 90"
    code = main([*small.split(), "--url", f"{server.url}/v1", "--json", files[0], "--html", files[1]])
    assert code == 0, capsys.readouterr()
    told = json.loads((tmp_path / "figures.json").read_text())
    assert "secret" not in (tmp_path / "figures.json").read_text()
    assert list(told["figures"]) == list(KINDS)
    assert server.metric("tokens_generated_total") == 2 + sum(
        one["generated_tokens"] for one in told["figures"].values()
    )
    assert told["figures"]["shared"]["skipped_share"] > 0
    text = (tmp_path / "page.html").read_text()
    assert text.count("<svg") == 1
    assert not re.search(r"(?:src|href)=\"(?!#)", text)
    assert "between tokens" in text


def test_what_cannot_be_measured_is_one_line(server, monkeypatch, capsys):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert main(["--url", server.url]) == 2
    assert "401" in capsys.readouterr().err
    assert main(["--url", "http://127.0.0.1:9"]) == 2
    assert "ConnectError" in capsys.readouterr().err
    assert main(["--set", "block_count"]) == 2
    assert "NAME=VALUE" in capsys.readouterr().err
