"""SA-9: thinking in answers of chat models, in template variables, and in the next turn's prompt."""

from __future__ import annotations

import json

import pytest

from tests.on_request import long_except
from tests.unit_tests.server.test_errors import CHAT, check_error
from tests.unit_tests.support.server import LiveServer

THINKING, ANSWER = (
    "First the city, then its weather.",
    "It is cold there, with some snow in the evening, and it will stay so.",
)
QUESTION = [{"role": "user", "content": "How is the weather in the city of Oslo today, and how will it be tomorrow?"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture
def says(thinker, prescribe):
    """A function: from now on every answer is this text; it returns the server."""

    def say(text: str) -> LiveServer:
        prescribe(thinker, text)
        return thinker

    return say


def ask(server: LiveServer, messages: list, *, stream: bool = False, **fields):
    """Thinking, content, and usage of an answer."""
    body = {"model": "embedded", "messages": messages, "max_tokens": 200, "temperature": 0.5, "presence_penalty": 0.1}
    completions = server.client().chat.completions
    extra = {name: fields.pop(name) for name in list(fields) if name not in ("tools", "tool_choice", "max_tokens")}
    if not stream:
        answer = completions.create(**body | fields, extra_body=extra)
        message = answer.choices[0].message
        assert getattr(message, "reasoning", None) == getattr(message, "reasoning_content", None)
        return getattr(message, "reasoning", None), message.content, answer
    thinking, content, last = "", "", None
    for part in completions.create(
        **body | fields, extra_body=extra, stream=True, stream_options={"include_usage": True}
    ):
        last = part
        for choice in part.choices:
            thinking += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
    return thinking or None, content, last


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
class TestAnswers:
    def test_thinking_is_separated_and_counted(self, says, stream):
        server = says(f"<think>\n{THINKING}\n</think>\n\n{ANSWER}")
        thinking, content, answer = ask(server, QUESTION, stream=stream)
        assert (thinking, content) == (THINKING, ANSWER)
        tokens = len(server.serving.tokenizer.tokenize(f"<think>\n{THINKING}\n</think>"))
        assert answer.usage.completion_tokens_details.reasoning_tokens == pytest.approx(tokens, abs=1)
        assert 0 < tokens < answer.usage.completion_tokens

    def test_cut_off(self, says, stream):
        """An answer that ends while it thinks has no content."""
        thinking, content, _ = ask(says(f"<think>\n{THINKING}"), QUESTION, stream=stream, max_tokens=8)
        assert THINKING.startswith(thinking)
        assert not content

    def test_the_budget_closes_thinking(self, thinker, stream):
        """The embedded model, inside of thinking, would go on: it has to answer after the budget."""
        continued = [*QUESTION, {"role": "assistant", "content": "<think>"}]
        fields = {"continue_final_message": True, "thinking_budget_tokens": 6, "max_tokens": 24}
        _, _, answer = ask(thinker, continued, stream=stream, **fields)
        closing = len(thinker.serving.tokenizer.tokenize("</think>"))
        assert answer.usage.completion_tokens_details.reasoning_tokens <= 6 + closing


class TestTemplates:
    def prompt(self, server: LiveServer, **fields) -> str:
        body = {"messages": QUESTION, "max_tokens": 1, "return_token_ids": True} | fields
        response = server.http.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        return server.serving.tokenizer.detokenize(response.json()["prompt_token_ids"], skip_special_tokens=False)

    def test_a_prompt_that_begins_thinking(self, thinker):
        """The answer begins inside of thinking where the prompt ends with the marker."""
        chat = thinker.serving.chat_format
        tokenize = thinker.serving.tokenizer.tokenize
        assert chat.ends_inside_thinking(tokenize("<|assistant|><think>\n"))
        assert not chat.ends_inside_thinking(tokenize("<|assistant|><think>\n\n</think>\n\n"))


class TestNextTurn:
    """Dropped thinking costs the tokens after it, and the explanation says so."""

    def test_dropped_thinking_is_the_cause(self, says, thinker):
        thinker.reset_cache()
        server = says(f"<think>\n{THINKING}\n</think>\n\n{ANSWER}")
        _, _, first = ask(server, QUESTION, tools=[WEATHER])
        history = [
            *QUESTION,
            {"role": "assistant", "content": ANSWER, "reasoning_content": THINKING},
            {"role": "user", "content": "And how is it in Rome, and in the rest of Italy, this week?"},
        ]
        _, _, second = ask(server, history, tools=[WEATHER], explain_prefix_cache=True)
        known = first.usage.prompt_tokens  # the change is right after it
        assert second.usage.prompt_tokens_details.cached_tokens == known // 16 * 16 > 0
        explanation = second.choices[0].model_dump()["prefix_cache_explanation"]
        assert explanation["cause"] == "dropped_thinking"
        assert explanation["agreeing"] == known
        assert "drops the thinking" in explanation["text"]

    def test_another_question_names_no_cause(self, says, thinker):
        """The prompts differ in their text, not in thinking."""
        thinker.reset_cache()
        server = says(f"<think>\n{THINKING}\n</think>\n\n{ANSWER}")
        ask(server, QUESTION, tools=[WEATHER])
        other = [*QUESTION[:-1], {"role": "user", "content": "Rome? " + QUESTION[-1]["content"]}]
        _, _, second = ask(server, other, tools=[WEATHER], explain_prefix_cache=True)
        explanation = second.choices[0].model_dump()["prefix_cache_explanation"]
        assert explanation["agreeing"] > 0
        assert "cause" not in explanation


def test_a_budget_needs_a_model_that_thinks(embedded, monkeypatch):
    body = {"messages": QUESTION, "max_tokens": 1, "thinking_budget_tokens": 5}
    assert embedded.http.post(CHAT, json=body).status_code == 200
    monkeypatch.setattr(embedded.serving.chat_format, "reasoning", None)  # as of a template without markers
    assert "has no thinking" in check_error(embedded.http.post(CHAT, json=body), 400)["message"]


def scored_texts(server: LiveServer, route: str, *, stream: bool, **fields) -> tuple[str, list[dict]]:
    """The content of an answer, and the log-probs of its tokens."""
    if route == CHAT:
        body = {"messages": QUESTION, "tools": [WEATHER], "logprobs": True, "top_logprobs": 2, "max_tokens": 200}
    else:
        body = {"input": QUESTION, "tools": [{"type": "function", **WEATHER["function"]}], "top_logprobs": 2}
        fields = {"max_output_tokens": fields.pop("max_tokens", 200), **fields}
    response = server.http.post(
        route, json=body | {"temperature": 0.5, "presence_penalty": 0.1, "stream": stream} | fields
    )
    assert response.status_code == 200, response.text
    if not stream and route == CHAT:
        choice = response.json()["choices"][0]
        return choice["message"]["content"] or "", choice["logprobs"]["content"]
    if not stream:
        parts = [part for item in response.json()["output"] if item["type"] == "message" for part in item["content"]]
        return "".join(part["text"] for part in parts), [one for part in parts for one in part["logprobs"]]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    content, scores = "", []
    for part in map(json.loads, lines):
        for choice in part.get("choices", ()):
            content += choice["delta"].get("content") or ""
            scores += (choice["logprobs"] or {}).get("content", ())
        if part.get("type") == "response.output_text.delta":
            content += part["delta"]
            scores += part["logprobs"]
    return content, scores


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
UNICODE = "naïve café, 世界 <to \U0001f600\u200d\U0001f600!"
SAID = {
    "text": (UNICODE, {}, UNICODE),
    "thinking": (f"<think>\nä{THINKING}\n</think>\n\n{UNICODE}", {}, UNICODE),
    "a call": (f"<think>\n世\n</think>\n\n{UNICODE}\n{CALL}", {}, UNICODE),
    "a text after a call": (f"世 {CALL}\n世 so it is.", {}, "世世 so it is."),
    "a stop word": (UNICODE, {"stop": "界 <to"}, "naïve café, 世"),
    "a stop word that goes on": (UNICODE, {"stop": ["界!", "fé"]}, "naïve ca"),
    "hidden tokens": ("a<|user|>é<|end|><|user|>b", {"ignore_eos": True, "max_tokens": 7}, "aéb"),
    **{f"cut after {count}": (UNICODE, {"max_tokens": count}, None) for count in range(3, 24, 4)},
}


CASES = [
    (name, route, stream)
    for name in SAID
    for route in (CHAT, "/v1/responses")
    for stream in (False, True)
    if route == CHAT or "stop" not in SAID[name][1]  # responses take no stop words
]
# Each text on each route, whole and streamed in turn; streams have the more ways to go wrong
PAIRS = [case for i, case in enumerate(CASES) if case[2] is (i // 2 % 3 < 2)]


@pytest.mark.parametrize(("name", "route", "stream"), long_except(PAIRS, CASES))
def test_bytes_of_log_probs_are_the_content(says, route, stream, name):
    """Also bytes of parts of characters; no entry is of thinking, a call, a stop word or a hidden token."""
    text, fields, expected = SAID[name]
    content, scores = scored_texts(says(text), route, stream=stream, **fields)
    assert expected in (None, content)
    assert content.encode() == b"".join(bytes(one["bytes"]) for one in scores)
    assert all(one["bytes"] for one in scores)
    assert any("\ufffd" in one["token"] for one in scores)
    assert all(best["bytes"] is not None for one in scores for best in one["top_logprobs"])
