"""SE-9: errors of a checkpoint's tokenizer or chat template are one line, and the server goes on."""

from __future__ import annotations

import json

import pytest
from tokenizers import Regex, decoders, pre_tokenizers

from tests.unit_tests.server.test_errors import CHAT, COMPLETIONS, check_error
from tests.unit_tests.support.server import LiveServer
from tests.unit_tests.text.test_template_rendering import ENDLESS

RECURSIVE = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
QUESTION = [{"role": "user", "content": "Hello"}]
EXPONENTIAL = r"([\s\S]+)+(?<![\s\S])"  # on every text of some length


def goes_on(server: LiveServer) -> None:
    answer = server.http.post(COMPLETIONS, json={"prompt": "The import", "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    server.check_idle()


@pytest.fixture
def wrapped(embedded):
    """The library's tokenizer of a server, as it was again afterwards."""
    tokenizer = embedded.serving.tokenizer._backend.wrapped
    before = tokenizer.pre_tokenizer, tokenizer.decoder
    yield tokenizer
    tokenizer.pre_tokenizer, tokenizer.decoder = before
    goes_on(embedded)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        pytest.param(RECURSIVE, "recurses beyond", id="recursion"),
        pytest.param(ENDLESS, "5 s of CPU time", id="loop", marks=pytest.mark.long),
    ],
)
def test_templates(embedded, monkeypatch, caplog, template, said):
    with monkeypatch.context() as patch:
        embedded.use_template(patch, template)
        for path in (CHAT, "/tokenize") if template == RECURSIVE else (CHAT,):
            error = check_error(embedded.http.post(path, json={"messages": QUESTION}, timeout=120.0), 400)
            assert said in error["message"]
            assert "checkpoint" in error["message"]
    assert "Traceback" not in caplog.text
    answer = embedded.http.post(CHAT, json={"messages": QUESTION, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    goes_on(embedded)


def test_texts_that_no_tokens_can_be_made_of(embedded, wrapped, caplog):
    wrapped.pre_tokenizer = pre_tokenizers.Split(Regex(EXPONENTIAL), "isolated")
    text = "The import statement of this language is long"
    messages = [{"role": "user", "content": text}]
    for path, body in (
        (COMPLETIONS, {"prompt": text}),
        (CHAT, {"messages": messages}),
        ("/tokenize", {"prompt": text}),
    ):
        message = check_error(embedded.http.post(path, json=body), 400)["message"]
        assert "failed to encode this text" in message
        assert "retry-limit" in message
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tokens_that_no_text_can_be_made_of(embedded, wrapped, caplog, stream):
    """The engine's thread or the event loop makes their text, and goes on."""
    wrapped.decoder = decoders.Sequence([wrapped.decoder, decoders.Fuse(), decoders.Replace(Regex(EXPONENTIAL), "x")])
    body = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True, "stream": stream}
    answer = embedded.http.post(COMPLETIONS, json=body, timeout=120.0)
    if stream:
        last = [line for line in answer.text.splitlines() if line.startswith("data: ")][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        error = check_error(answer, 400)
    assert "failed to decode these tokens" in error["message"]
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in caplog.text
