"""SA-6: tools reach the template, and calls are read from answers, whole and streamed, in the same way."""

from __future__ import annotations

import json
import random

import pytest
import tokenizers
import torch

from megatron_ext.config.embedded import EMBEDDED_MODEL_DIR
from megatron_ext.server.openai.chat import ChatFormat
from megatron_ext.server.openai.engine_requests import PromptLimits, chat_specs
from megatron_ext.server.openai.protocol import ChatRequest
from megatron_ext.server.openai.tool_calls import ToolCallReader
from megatron_ext.text.tokenizer import TextTokenizer
from tests.unit_tests.server.test_errors import CHAT, check_error
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
SPOKEN = {"name": "weather", "arguments": {"city": "Oslo"}}


def read(text: str, sizes: random.Random | None = None, max_calls: int = 9) -> tuple[str, list[tuple[str, object]]]:
    """Content and calls of a text, in one piece or cut at random."""
    reader, start, content, calls = ToolCallReader(max_calls), 0, "", []
    while start < len(text) or start == 0:
        end = len(text) if sizes is None else min(len(text), start + sizes.randrange(1, 9))
        new, found = reader.feed(text[start:end], is_last=end == len(text))
        content, calls, start = content + new, calls + found, max(end, 1)
    assert reader.count == len(calls)
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


WEATHER_CALL, TIME_CALL = ("weather", {"city": "Oslo"}), ("time", {})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello < world \n", "Hello < world \n", []),
        ("", "", []),
        (CALL, "", [WEATHER_CALL]),
        (f"I look.\n{CALL}\n", "I look.", [WEATHER_CALL]),
        (f"a {CALL}\n{OTHER} b  c ", "ab  c", [WEATHER_CALL, TIME_CALL]),
        (CALL.removesuffix("</tool_call>"), "", [WEATHER_CALL]),
        ("<tool_call>\nnothing</tool_call> x", "<tool_call>\nnothing</tool_call> x", []),
        (f'<tool_call>{{"name": 5}}</tool_call>{OTHER}', '<tool_call>{"name": 5}</tool_call>', [TIME_CALL]),
        ("<tool_call>{", "<tool_call>{", []),
        ("x <tool_cal", "x <tool_cal", []),
        ('<tool_call>{"name": "f", "parameters": {"a": "ä"}}</tool_call>', "", [("f", {"a": "ä"})]),
        (
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            [],
        ),
        ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_text_is_taken_apart_however_it_comes(text, content, calls):
    assert read(text) == (content, calls)
    for seed in range(20 if len(text) < 1000 else 1):
        assert read(text, random.Random(seed)) == (content, calls)


def test_as_many_calls_as_are_wanted():
    assert read(f"a{CALL}{OTHER}", max_calls=1) == ("a", [WEATHER_CALL])


@pytest.fixture
def says(embedded, monkeypatch):
    """A function: from now on every answer is this text, through the engine's tokens."""

    def say(text: str) -> LiveServer:
        ids = [*embedded.serving.tokenizer.tokenize(text), embedded.serving.chat.end_of_turn]

        def choose(logits, step):
            options = [row.sampling.logits_options for row in step.sampling]
            made = [len(one.tokens) - one.prompt_length for one in options]
            return torch.tensor([ids[count] for count in made])

        monkeypatch.setattr("megatron_ext.runner.step_output.next_tokens", choose)
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
                assert one.id.startswith("call_")
                calls[one.index] = one.function.name, json.loads(one.function.arguments)
    return [
        (content or (None if calls else ""), [calls[i] for i in sorted(calls)], reason)
        for _, (content, calls, reason) in sorted(found.items())
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
class TestAnswers:
    def test_calls(self, says, stream):
        text = f"I look it up.\n{CALL}\n{OTHER}"
        assert ask(says(text), stream=stream, n=2) == [("I look it up.", [WEATHER_CALL, TIME_CALL], "tool_calls")] * 2
        assert ask(says(CALL), stream=stream) == [(None, [WEATHER_CALL], "tool_calls")]
        assert ask(says(text), stream=stream, parallel_tool_calls=False)[0][1] == [WEATHER_CALL]

    def test_ignores_tool_calls_when_no_tools_are_given(self, says, stream):
        assert ask(says(CALL), stream=stream, tool_choice="none") == [(CALL, [], "stop")]
        assert ask(says(CALL), stream=stream, tools=[]) == [(CALL, [], "stop")]
        assert ask(says("No <tool> at all. "), stream=stream) == [("No <tool> at all. ", [], "stop")]

    def test_cut_off(self, says, stream):
        """The partial call counts; the finish reason is given."""
        text = CALL + OTHER
        count = len(says(text).serving.tokenizer.tokenize(CALL))
        assert ask(says(text), stream=stream, max_tokens=count) == [(None, [WEATHER_CALL], "length")]


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
    def test_tools_are_told(self, embedded):
        """Special tokens that they spell stay text, in names of parameters, too."""
        text = prompt_of(embedded, QUESTION)
        assert json.dumps(WEATHER) in text
        assert text.endswith("<|user|>How is the weather in Oslo?<|end|><|assistant|>")
        assert prompt_of(embedded, QUESTION, tool_choice="none") == text
        assert prompt_of(embedded, QUESTION, tools=[]) == "<|user|>How is the weather in Oslo?<|end|><|assistant|>"

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
        assert f"<|assistant|>\n{CALL}<|end|>" in text
        assert "<tool_response>\n12 degrees<|end|>\n</tool_response>" in text


def function(**fields: object) -> dict:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("fields", "named", "param"),
    [
        ({"tool_choice": "required"}, "'auto' and 'none' are", "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
            '"function" is not supported',
            "tool_choice",
        ),
        ({"tools": [WEATHER | {"type": "custom"}]}, "function", "tools"),
        ({"tools": [function(strict=True)]}, "strict", "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "what": 1}}]},
            "what is not a known field",
            "tools.0.function.what",
        ),
        ({"tools": [WEATHER] * 129}, "128", "tools"),
        ({"functions": [{"name": "f"}]}, "functions", "functions"),
        (
            {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "not JSON",
            "messages",
        ),
    ],
    ids=str,
)
def test_refused_by_name(embedded, fields, named, param):
    body = {"messages": QUESTION, "tools": [WEATHER], "max_tokens": 1} | fields
    error = check_error(embedded.http.post(CHAT, json=body), 400)
    assert named in error["message"]
    assert error["param"] == param


def test_a_template_that_takes_no_tools(embedded, monkeypatch):
    monkeypatch.setattr(embedded.serving.tokenizer, "_chat_template", "{{ messages[0].content }}")
    body = {"messages": QUESTION, "tools": [WEATHER], "max_tokens": 1}
    assert "does not support tools" in check_error(embedded.http.post(CHAT, json=body), 400)["message"]


def test_marks_that_are_special_tokens_are_seen(tmp_path):
    """Texts are without special tokens, unless calls are looked for that begin with one."""
    for file in EMBEDDED_MODEL_DIR.iterdir():
        if file.suffix in (".json", ".jinja"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    fast = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL_DIR / "tokenizer.json"))
    limits = PromptLimits(1000, 1000)
    body = ChatRequest.model_validate({"messages": QUESTION, "tools": [WEATHER]})
    for marks, skips in ((["<other>"], True), (["<tool_call>", "</tool_call>"], False)):
        fast.add_special_tokens(marks)
        fast.save(str(tmp_path / "tokenizer.json"))
        (spec,) = chat_specs(body, [5, 6], limits, ChatFormat(TextTokenizer(tmp_path)))
        assert spec.params.skip_special_tokens == skips
