"""SA-5 on the server: forms in OpenAI's words and vLLM's, refusals with their error objects, limits."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import jsonschema
import pytest

from megatron_ext.config import ServerLimits
from megatron_ext.text.grammars import Grammars
from tests.unit_tests.server.test_errors import CHAT, COMPLETIONS, check_alive, check_error
from tests.unit_tests.support.server import PATIENCE, PATIENT, LiveServer, embedded_engine

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
OPENAI = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
QUESTION = [{"role": "user", "content": "Who is it?"}]


@pytest.fixture(scope="module")
def strict(serve) -> LiveServer:
    return serve(embedded_engine(), "embedded", limits=replace(PATIENT, max_schema_kb=1.0))


@pytest.mark.parametrize("form", [{"response_format": OPENAI}, {"structured_outputs": {"json": SCHEMA}}], ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_schema(embedded, form, stream):
    """Each choice by itself, by OpenAI's client."""
    client = embedded.client()
    arguments = {"model": "embedded", "messages": QUESTION, "max_tokens": 60, "n": 3, "seed": 1, "extra_body": form}
    if stream:
        texts = ["", "", ""]
        for part in client.chat.completions.create(**arguments, stream=True):
            for choice in part.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        answer = client.chat.completions.create(**arguments)
        texts = [choice.message.content for choice in answer.choices]
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_one_of_several_texts(embedded, stream):
    """SA-5: vLLM's `choice`; without it the model writes something else."""
    texts = ["positive", "negative", 'neither "one"']
    body = {"messages": QUESTION, "max_tokens": 30, "n": 4, "seed": 1, "stream": stream}
    answer = embedded.http.post(CHAT, json=body | {"structured_outputs": {"choice": texts}})
    written = ["", "", "", ""]
    if stream:
        for line in answer.text.split("\n\n")[:-2]:
            for choice in json.loads(line[6:])["choices"]:
                written[choice["index"]] += choice["delta"].get("content") or ""
    else:
        written = [choice["message"]["content"] for choice in answer.json()["choices"]]
    assert set(written) <= set(texts)
    assert len(set(written)) > 1
    free = embedded.http.post(CHAT, json=body | {"stream": False}).json()["choices"][0]
    assert free["message"]["content"] not in texts


def test_the_schema_of_a_json_object_is_followed(embedded):
    """SA-5: llama.cpp's form of a schema is no wish that is ignored."""
    form = {"type": "json_object", "schema": SCHEMA}
    body = {"messages": QUESTION, "max_tokens": 60, "seed": 1, "response_format": form}
    choice = embedded.http.post(CHAT, json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def with_schema(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


@pytest.mark.parametrize(
    ("form", "named", "code"),
    [
        (with_schema({"not": {}}), 'Unimplemented keys: ["not"]', "schema_not_supported"),
        (with_schema({"type": "array", "uniqueItems": True}), "uniqueItems", "schema_not_supported"),
        ({"type": "regex", "regex": "(?=a)"}, "look-around", "schema_not_supported"),
        (with_schema({"enum": ["x" * 1100]}), "at most 1024 (--max-schema-kb)", "schema_too_long"),
        ({"type": "grammar"}, "is not a response format", None),
        (with_schema(5), "one with a schema", None),
        ({"type": "json_schema"}, "one with a schema", None),
        ("json", "is not a response format", None),
        ({"type": "json_object", "shema": SCHEMA}, "'shema'", None),
        ({"type": "json_object", "schema": 5}, "one with a schema", None),
        ({"type": "text", "schema": SCHEMA}, "text has type", None),
        ({"type": "json_schema", "schema": SCHEMA}, "json_schema has json_schema", None),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strikt": True}}, "'strikt'", None),
        ({"type": "choice", "choice": []}, "one with texts", None),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_refused_by_name(strict, form, named, code):
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": QUESTION})):
        error = check_error(strict.http.post(path, json=body | {"response_format": form}), 400)
        assert named in error["message"]
        assert (error["param"], error["code"]) == ("response_format", code)
    assert strict.serving.requests.living == 0


TOO_MUCH = {"type": "regex", "regex": "([a-z ]*[aeiou][a-z ]{200}q)+[.]"}  # the lexer runs out of states on the way


@pytest.mark.parametrize("choices", [1, 3])
def test_a_grammar_that_becomes_too_much_is_a_400(embedded, choices):
    """SE-10: the library's reason is the error of a whole answer."""
    body = {"messages": QUESTION, "max_tokens": 250, "n": choices, "seed": 1, "response_format": TOO_MUCH}
    error = check_error(embedded.http.post(CHAT, json=body), 400)
    assert "the output cannot satisfy response_format: lexer error: too many states" in error["message"]
    assert error["type"] == "invalid_request_error"
    check_alive(embedded)
    assert embedded.serving.requests.living == 0


def test_a_slow_compilation_delays_no_other_request(strict, monkeypatch):
    """The schema is compiled in its own thread: others are answered meanwhile, and the engine never waits."""
    compile_anew, threads, may_end = Grammars._compile_anew, [], threading.Event()

    def slow(self, form):
        threads.append(threading.current_thread().name)
        if form.source == "slow":
            may_end.wait(PATIENCE)
        return compile_anew(self, form)

    monkeypatch.setattr(Grammars, "_compile_anew", slow)
    body = {"messages": QUESTION, "max_tokens": 4, "response_format": {"type": "regex", "regex": "slow"}}
    with monkeypatch.context() as patch:
        patch.setattr(strict.serving.structured_outputs, "_limits", ServerLimits(grammar_timeout=0.05))
        error = check_error(strict.http.post(CHAT, json=body), 400)
    assert "not compiled within 0.05 s (--grammar-timeout)" in error["message"]
    assert (error["param"], error["code"]) == ("response_format", "schema_too_slow")
    quick = body | {"response_format": {"type": "regex", "regex": "quick"}}
    assert strict.http.post(CHAT, json=quick).json()["choices"][0]["message"]["content"] == "quick"
    assert all(name.startswith("grammars") for name in threads)
    check_alive(strict)
    may_end.set()
