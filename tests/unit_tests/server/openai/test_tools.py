"""SA-6: tools reach the template, and calls are read from answers, whole and streamed, in the same way."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import tokenizers

from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.errors import ConfigError
from megatron_ext.server.api_keys import Caller
from megatron_ext.server.openai import request_fields
from megatron_ext.server.openai.chat import ChatFormat
from megatron_ext.server.openai.engine_requests import chat_inputs
from megatron_ext.server.openai.protocol import ChatRequest
from megatron_ext.server.openai.structured_output_checks import answer_format_of, constrained_format
from megatron_ext.text.chat_template import ChatOptions
from megatron_ext.text.tokenizer import TextTokenizer
from megatron_ext.text.tool_calls.formats import HERMES
from tests.on_request import long_except
from tests.unit_tests.scheduling.builders import make_limits
from tests.unit_tests.server.test_errors import CHAT, check_error
from tests.unit_tests.support.agent_loop import WITHOUT_TOOLS
from tests.unit_tests.support.server import LiveServer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city; <|end|> is no end",
        "parameters": {"type": "object", "properties": {"<|user|>": {"type": "string"}}},
    },
}
QUESTION = [{"role": "user", "content": "How is the weather in Oslo?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OTHER = '<tool_call>{"arguments": {}, "name": "time"}</tool_call>'


WEATHER_CALL, TIME_CALL = ("weather", {"city": "Oslo"}), ("time", {})


@pytest.fixture
def says(embedded, prescribe):
    """A function: from now on every answer is this text; it returns the server."""

    def say(text: str) -> LiveServer:
        prescribe(embedded, text)
        return embedded

    return say


def ask(server: LiveServer, *, stream: bool, **fields):
    """Content, calls, and why it ended, of each choice, by OpenAI's client."""
    body = {"model": "embedded", "messages": QUESTION, "tools": [WEATHER], "max_tokens": 120, "temperature": 0.5}
    # a penalty, so that steps say what was generated
    arguments = body | {"presence_penalty": 0.1} | fields
    completions = server.client().chat.completions
    if not stream:
        answer = completions.create(**arguments)
        return [
            (
                choice.message.content,
                [(one.function.name, json.loads(one.function.arguments)) for one in choice.message.tool_calls or ()],
                choice.finish_reason,
            )
            for choice in answer.choices
        ]
    found: dict[int, list] = {}
    for part in completions.create(**arguments, stream=True):
        for choice in part.choices:
            content, calls, _ = found.setdefault(choice.index, ["", {}, None])
            found[choice.index][0] = content + (choice.delta.content or "")
            found[choice.index][2] = choice.finish_reason
            for one in choice.delta.tool_calls or ():
                if one.index not in calls:
                    assert one.id.startswith("call_")
                    calls[one.index] = [one.function.name, ""]
                calls[one.index][1] += one.function.arguments
    return [
        (
            content or (None if calls else ""),
            [(name, json.loads(calls[i][1])) for i, (name, _) in calls.items()],
            reason,
        )
        for _, (content, calls, reason) in sorted(found.items())
    ]


@pytest.mark.parametrize("stream", long_except([True], [False, True]), ids=["whole", "streamed"])
class TestAnswers:
    def test_calls(self, says, stream):
        text = f"I look it up.\n{CALL}\n{OTHER}"
        assert ask(says(text), stream=stream, n=2) == [("I look it up.", [WEATHER_CALL, TIME_CALL], "tool_calls")] * 2
        assert ask(says(CALL), stream=stream) == [(None, [WEATHER_CALL], "tool_calls")]
        assert ask(says(text), stream=stream, parallel_tool_calls=False)[0][1] == [WEATHER_CALL]

    def test_cut_inside_a_marker(self, says, stream):
        """S14: nothing of a marker is content. What a stop ends is all text."""
        for text, answer in ((f"a{CALL[:5]}", "a"), (CALL[:-3], None), (CALL[:20], "")):
            server = says(text + " and more")
            count = len(server.serving.tokenizer.tokenize(text))
            calls = [WEATHER_CALL] if answer is None else []
            assert ask(server, stream=stream, max_tokens=count) == [(answer, calls, "length")]
        assert ask(says("a <"), stream=stream) == [("a <", [], "stop")]


FORECAST = {
    "type": "function",
    "function": {
        "name": "forecast",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("stream", long_except([True], [False, True]), ids=["whole", "streamed"])
class TestGuided:
    """SA-6: the embedded model, which was not trained to call functions, calls what a request demands."""

    def test_required(self, trained, stream):
        tools = [FORECAST, CLOCK | {"function": CLOCK["function"] | {"parameters": FORECAST["function"]["parameters"]}}]
        for seed in range(2):
            ((content, calls, reason),) = ask(
                trained, stream=stream, tools=tools, tool_choice="required", parallel_tool_calls=False, seed=seed
            )
            assert (content, len(calls), reason) == (None, 1, "tool_calls")
            name, arguments = calls[0]
            assert name in ("forecast", "clock")
            assert arguments["city"] in ("Oslo", "Rome")
            assert 1 <= arguments["days"] <= 9

    @pytest.mark.parametrize("allowed", [False, True], ids=["named", "allowed"])
    def test_named(self, trained, stream, allowed):
        named = {"type": "function", "function": {"name": "clock"}}
        choice = (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}} if allowed else named
        )
        fields = {"tools": [FORECAST, CLOCK], "tool_choice": choice, "parallel_tool_calls": False, "temperature": 0.0}
        (answer,) = ask(trained, stream=stream, **fields)
        assert answer[1][0][0] == "clock"

    def test_strict_only_where_a_call_is_made(self, says, embedded, stream):
        """Free text stays free beside a strict tool; a call against its schema cannot be generated."""
        assert ask(says("No <tool> at all. "), stream=stream, tools=[FORECAST]) == [("No <tool> at all. ", [], "stop")]
        form = ChatRequest.model_validate({"messages": QUESTION, "tools": [FORECAST]})
        chat = embedded.serving.chat_format
        guided = constrained_format(form, answer_format_of(form, [5, 6], chat), chat)
        assert guided is not None
        matcher = embedded.serving.engine.grammars.matcher(guided)
        matcher.take(embedded.serving.tokenizer.tokenize('Let me see. <tool_call>\n{"name": "forecast", "arguments": '))
        with pytest.raises(ValueError):
            matcher.take(embedded.serving.tokenizer.tokenize('{"town"'))


def test_a_stream_returns_pieces_early(says):
    """Name and arguments come while the call is being written, and together they are the whole call."""
    long = json.dumps({"name": "weather", "arguments": {"city": "a city with a name of many words"}})
    server = says(f"<tool_call>\n{long}\n</tool_call>")
    client = server.client().chat.completions
    body = {"model": "embedded", "messages": QUESTION, "tools": [WEATHER], "max_tokens": 120, "temperature": 0.5}
    parts = [part.choices[0].delta.tool_calls for part in client.create(**body, presence_penalty=0.1, stream=True)]
    pieces = [one for part in parts if part for one in part]
    assert pieces[0].function.name == "weather"
    assert all(one.function.name is None and one.id is None for one in pieces[1:])
    assert len(pieces) > 5
    assert json.loads("".join(one.function.arguments for one in pieces)) == json.loads(long)["arguments"]


COLOR = {"type": "object", "properties": {"a": {"type": "string", "format": "color"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("path", "tool", "required"),
    [
        (CHAT, {"type": "function", "function": {"name": "f", "parameters": COLOR}}, "required"),
        ("/v1/responses", {"type": "function", "name": "f", "parameters": COLOR}, "required"),
        ("/v1/messages", {"name": "f", "input_schema": COLOR}, {"type": "any"}),
    ],
    ids=["chat", "responses", "messages"],
)
def test_what_no_grammar_enforces(trained, path, tool, required, monkeypatch, caplog):
    """S19: a format that is not known does not matter where a tool is not strict, and is named where it is."""
    monkeypatch.setattr(request_fields, "_noted", set())
    caplog.set_level("INFO", request_fields.__name__)
    limit = "max_output_tokens" if "responses" in path else "max_tokens"
    given = {"input": "a"} if "responses" in path else {"messages": QUESTION}
    body = {"model": "embedded", **given, limit: 60, "temperature": 0, "tools": [tool], "tool_choice": required}
    answer = trained.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert [record.args for record in caplog.records if "does not use" in record.msg] == [("parts of a tool's schema",)]
    assert '\\"a\\": ' in answer.text or '"a":' in answer.text, "the rest of the schema holds"
    strict = tool | {"function": tool["function"] | {"strict": True}} if "function" in tool else tool | {"strict": True}
    for choice in (required, {"type": "auto"} if "messages" in path else "auto"):
        answer = trained.http.post(path, json=body | {"tools": [strict], "tool_choice": choice})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400
        assert "function 'f' cannot be enforced (Unknown format: color)" in message
        assert "rule" not in message, "of the grammar"


def prompt_of(server: LiveServer, messages: list, **fields: object) -> str:
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True, "tools": [WEATHER]} | fields
    response = server.http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    ids = response.json()["prompt_token_ids"]
    assert [one for one in ids if one in (1, 2, 3)] == [
        {"<|system|>": 1, "<|user|>": 2, "<|assistant|>": 3}[name] for name in fields_of_roles(messages, body)
    ]
    return server.serving.tokenizer.detokenize(ids, skip_special_tokens=False)


def fields_of_roles(messages: list, body: dict) -> list[str]:
    roles = ["user" if one["role"] == "tool" else one["role"] for one in messages]
    if body["tools"] and roles[0] != "system":
        roles.insert(0, "system")
    return [f"<|{role}|>" for role in (*roles, "assistant")]


class TestPrompts:
    def test_a_conversation_with_calls(self, embedded):
        """A call comes back as OpenAI's clients send it, with arguments in a text, and reads as the model wrote it."""
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        messages = [
            {"role": "system", "content": "Be brief."},
            *QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "12 degrees<|end|>", "tool_call_id": "call_1"},
        ]
        text = prompt_of(embedded, messages)
        assert text.startswith("<|system|>Be brief.\n\n")
        assert f"<|assistant|>{CALL}<|end|>" in text
        assert "<tool_response>\n12 degrees<|end|>\n</tool_response>" in text


def function(**fields: object) -> dict:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("fields", "named", "param"),
    [
        ({"tool_choice": "maybe"}, "auto, none, required", "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "there are no tools", "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "time"}}},
            "'time', which is not in tools",
            "tool_choice",
        ),
        ({"tool_choice": {"type": "function"}}, "needs the name", "tool_choice"),
        (
            {"tool_choice": "required", "response_format": {"type": "regex", "regex": "a"}},
            "cannot be combined",
            None,
        ),
        ({"tools": [WEATHER | {"type": "custom"}]}, "function", "tools"),
        (
            {
                "tools": [
                    function(strict=True, parameters={"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}})
                ]
            },
            "tools: the parameters of the strict function 'f' cannot be enforced (Pointer",
            "tools",
        ),
        ({"tools": [WEATHER] * 129}, "128", "tools"),
        ({"functions": [{"name": "f"}]}, "functions", "functions"),
    ],
    ids=str,
)
def test_refused_by_name(embedded, fields, named, param):
    body = {"messages": QUESTION, "tools": [WEATHER], "max_tokens": 1} | fields
    error = check_error(embedded.http.post(CHAT, json=body), 400)
    assert named in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
class TestTemplateWithoutTools:
    """S15: the generic form."""

    @pytest.fixture(autouse=True)
    def template(self, embedded, trained, monkeypatch):
        for server in (embedded, trained):
            server.use_template(monkeypatch, WITHOUT_TOOLS)

    def test_calls_are_read(self, says, stream):
        text = f"I look it up.\n{CALL}\n{OTHER}"
        assert ask(says(text), stream=stream) == [("I look it up.", [WEATHER_CALL, TIME_CALL], "tool_calls")]
        assert ask(says(text), stream=stream, parallel_tool_calls=False)[0][1] == [WEATHER_CALL]
        assert ask(says(CALL), stream=stream, tool_choice="none") == [(CALL, [], "stop")]


def test_the_start_says_which_form_tools_have(caplog, tmp_path):
    """Once; a parser of other calls than the generic ones refuses tools by name."""
    (tmp_path / "tokenizer.json").write_bytes((EMBEDDED_MODEL_DIR / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(WITHOUT_TOOLS + "[TOOL_CALLS]")
    caplog.set_level(logging.INFO)
    tokenizer = TextTokenizer(tmp_path)
    options = ChatOptions(tools=[WEATHER])
    for name in ("auto", "hermes"):
        chat = ChatFormat(tokenizer, tool_calls=name)
        assert chat.tool_calls is HERMES
        for _ in range(2):
            assert '"name": "weather"' in chat.render_dicts(QUESTION, options).text
        assert [line.startswith("the chat template has no tools: requests") for line in caplog.messages] == [True]
        caplog.clear()
    chat = ChatFormat(tokenizer, tool_calls="mistral")
    assert "--tool-call-parser mistral reads no calls of the generic form" in caplog.text
    assert "Oslo" in chat.render_dicts(QUESTION).text
    with pytest.raises(ConfigError, match=r"^tools: .* --tool-call-parser is not hermes"):
        chat.render_dicts(QUESTION, options)
    caplog.clear()
    ChatFormat(TextTokenizer(EMBEDDED_MODEL_DIR))
    assert not caplog.messages


def test_marks_that_are_special_tokens_are_seen(tmp_path):
    """Texts are without special tokens, unless calls are looked for that begin with one."""
    for file in EMBEDDED_MODEL_DIR.iterdir():
        if file.suffix in (".json", ".jinja"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    fast = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL_DIR / "tokenizer.json"))
    limits = make_limits(total_blocks=250, max_sequence_length=1000)
    body = ChatRequest.model_validate({"messages": QUESTION, "tools": [WEATHER]})
    for marks, skips in ((["<other>"], True), (["<tool_call>", "</tool_call>"], False)):
        fast.add_special_tokens(marks)
        fast.save(str(tmp_path / "tokenizer.json"))
        chat_format = ChatFormat(TextTokenizer(tmp_path))
        serving = SimpleNamespace(limits=limits, chat_format=chat_format, defaults={})
        (inputs,) = chat_inputs(body, [5, 6], serving, Caller())
        assert inputs.params.skip_special_tokens == skips
