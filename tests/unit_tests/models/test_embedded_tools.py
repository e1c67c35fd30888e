"""Synthetic conversations that the embedded model learns tool calls from, and their evaluation."""

from __future__ import annotations

import json
from dataclasses import astuple
from functools import cache

from examples.embedded_model.chats import chat_without_functions
from examples.embedded_model.conversations import (
    Exchange,
    conversation,
    held_out_exchanges,
    is_held_out_value,
)
from examples.embedded_model.corpus import Document, Entry
from examples.embedded_model.tool_evaluation import parsed_calls, score
from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.text.tokenizer_files import read_chat_templates

DOCUMENTS = [Document("m", tuple(Entry(f"m.f{i}", f"m.f{i}()", f"Does the thing number {i}.") for i in range(5)))]
ENTRIES = [(entry.name, entry.text) for entry in DOCUMENTS[0].entries]
SHORT = 15  # arguments that are numbers or names of the documentation are split by documents, if at all


@cache
def template() -> str:
    found = read_chat_templates(EMBEDDED_MODEL_DIR).chosen(has_tools=True)
    assert found is not None
    return found


@cache
def exchanges() -> tuple[Exchange, ...]:
    return tuple(held_out_exchanges(DOCUMENTS, 60))


def calls_of(messages) -> list[tuple[str, dict]]:
    functions = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    return [(function["name"], function["arguments"]) for function in functions]


def test_held_out_names_and_arguments_are_in_no_training_conversation():
    """EM-21: the sides have no function and no free argument in common."""
    trained = [call for number in range(300) for call in calls_of(conversation(number, ENTRIES)[0])]
    held_out = [exchange.expected for exchange in exchanges()]
    for calls, side in ((trained, False), (held_out, True)):
        assert all(is_held_out_value(name) == side for name, _ in calls)
        values = {value for _, arguments in calls for value in arguments.values() if isinstance(value, str)}
        assert len(values) > SHORT
        assert all(is_held_out_value(value) == side for value in values - {name for name, _ in ENTRIES})
    assert not {name for name, _ in trained} & {name for name, _ in held_out}


def test_chats_without_functions_call_none():
    """EM-21: questions that a function would answer occur without functions, too, and are answered without a call."""
    chats = [chat_without_functions(number, ENTRIES) for number in range(60)]
    assert not any(calls_of(messages) for messages in chats)
    asked = {message["content"] for messages in chats for message in messages if message["role"] == "user"}
    assert any(question.startswith("What is the weather in") for question in asked)


def test_a_conversation_calls_a_function_and_repeats_what_it_returned():
    """EM-21: every call is of a function in the prompt, with all of its arguments; its answer follows its result."""
    for number in range(40):
        messages, tools = conversation(number, ENTRIES)
        schemas = {tool.name: set(tool.properties) for tool in tools}
        assert len(schemas) == len(tools)
        calls = calls_of(messages)
        assert calls
        assert all(schemas[name] == set(arguments) for name, arguments in calls)
        roles = [message["role"] for message in messages if message["role"] != "system"]
        assert roles.count("tool") == len(calls)
        assert roles[-1] == "assistant"


def answer_to(exchange: Exchange, **changes: object) -> str:
    name, arguments = exchange.expected
    call = {"name": name, "arguments": arguments} | changes
    return f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {json.dumps(call["arguments"])}}}\n</tool_call>'


def test_scores_of_answers():
    """EM-21: each share counts what it says, and nothing that comes after a mistake."""
    exchange = next(one for one in exchanges() if len(one.tools) > 1)
    other = next(tool.name for tool in exchange.tools if tool.name != exchange.expected[0])

    def scores(answer: str) -> tuple[float, ...]:
        return astuple(score(parsed_calls(template(), answer, thinks=False), exchange))

    right = answer_to(exchange)
    assert scores(right) == (1, 1, 1, 1)
    assert scores(answer_to(exchange, arguments={"x": "y"})) == (1, 1, 1, 0)
    assert scores(right.replace("}}", "")) in ((1, 1, 0, 0), (0, 0, 0, 0))
    assert scores(answer_to(exchange, name=other)) == (1, 0, 0, 0)
    assert scores(answer_to(exchange, name="no_such_function")) == (0, 0, 0, 0)
    assert scores(right + "\n" + right) == scores("It is cold.") == (0, 0, 0, 0)
