"""PY-17: `megatron-ext chat`: streamed answers, the tokens of each turn, and a server of its own."""

from __future__ import annotations

import io
import json
import sys
import urllib.request

import pytest

from megatron_ext.commands import chat
from megatron_ext.server.api_keys import API_KEY_VARIABLE

LONG = "What does the import statement do? " * 12
STAND_IN = "import os, signal; print('ready: ' + os.environ['URL'], flush=True); signal.pause()"


@pytest.fixture
def bodies(monkeypatch) -> list[dict]:
    """Bodies of the requests that are sent."""
    sent, send = [], urllib.request.urlopen

    def record(request: urllib.request.Request, **options: object):
        if request.data is not None:
            sent.append(json.loads(request.data))
        return send(request, **options)

    monkeypatch.setattr(urllib.request, "urlopen", record)
    return sent


def say(monkeypatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def answers(shown: str) -> list[tuple[str, list[int]]]:
    """Texts of the answers, and the counts in the line after each."""
    turns, text = [], ""
    for line in shown.splitlines():
        if line.startswith("[") and line.endswith(" generated]"):
            turns.append((text.removesuffix("\n"), [int(word) for word in line[1:-1].split() if word.isdigit()]))
            text = ""
        else:
            text += f"{line}\n"
    return turns


def test_a_conversation(trained, bodies, monkeypatch, capsys):
    """Each turn has all that was said, and its counts are the server's."""
    say(monkeypatch, LONG, "  ", "And a list?")
    assert chat.main(["--url", trained.url, "--system", "You explain Python."]) == chat.DONE
    (first, counts), (_, second) = answers(capsys.readouterr().out)
    system = {"role": "system", "content": "You explain Python."}
    question = {"role": "user", "content": LONG}
    assert [body["messages"] for body in bodies] == [
        [system, question],
        [system, question, {"role": "assistant", "content": first}, {"role": "user", "content": "And a list?"}],
    ]
    for body, (cached, computed, generated) in zip(bodies, (counts, second), strict=True):
        asked = {"model": "embedded", "messages": body["messages"], "max_tokens": 1}
        usage = trained.http.post("/v1/chat/completions", json=asked).json()["usage"]
        assert cached + computed == usage["prompt_tokens"]
        assert generated > 0
    assert counts[0] == 0
    assert second[0] >= counts[1] - 64


def test_a_refused_question_is_not_part_of_the_conversation(trained, bodies, monkeypatch, capsys):
    say(monkeypatch, LONG * 1000, "And a list?")
    assert chat.main(["--url", trained.url]) == chat.DONE
    assert f"[{trained.url}/v1/chat/completions answers 400: " in capsys.readouterr().out
    assert bodies[1]["messages"] == [{"role": "user", "content": "And a list?"}]


def test_an_answer_that_is_ended_early_is_kept(trained):
    conversation = chat.Chat(trained.url, None)
    parts = conversation.ask(LONG)
    said = next(parts) + next(parts)
    parts.close()
    assert conversation.usage == {}
    assert conversation._messages[1:] == [{"role": "assistant", "content": said}]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--url", "localhost:1"], "--url localhost:1 is not an address"),
        (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1/v1/models does not answer: [Errno"),
        (["--url", "http://"], "does not answer: no host given"),
        (["--url", "http://[x"], "ValueError('Invalid IPv6 URL')"),
    ],
)
def test_a_server_that_is_not_there(argv, expected, capsys):
    assert chat.main(argv) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.realtime
def test_a_server_of_its_own(trained, monkeypatch, capsys):
    """The server has the flags, and ends with the conversation."""
    monkeypatch.setattr(chat, "SERVE", (sys.executable, "-c", STAND_IN))
    monkeypatch.setenv("URL", trained.url)
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    say(monkeypatch, "What is a list?")
    assert chat.main(["model"]) == chat.DONE
    assert len(answers(capsys.readouterr().out)) == 1


@pytest.mark.realtime
def test_a_server_that_does_not_start(monkeypatch, tmp_path, capsys):
    """Its exit code and output are shown (`--dry-run`); it gets the flags, after defaults, and a key."""
    code = """
import json, os, sys
open(sys.argv[-1], "w").write(json.dumps([sys.argv[1:], os.environ["KEY"]]))
print("a plan")
exit(7)"""
    monkeypatch.setattr(chat, "SERVE", (sys.executable, "-c", code.replace("KEY", API_KEY_VARIABLE)))
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert chat.main(["model", "--seed", "3", str(tmp_path / "said")]) == 7
    assert capsys.readouterr().out == "a plan\n"
    words, key = json.loads((tmp_path / "said").read_text())
    assert words[-4:] == ["model", "--seed", "3", str(tmp_path / "said")]
    assert words[:-4] == ["--log-level", "warning", "--host", "127.0.0.1", "--port", "0"]
    assert len(key) > 20
