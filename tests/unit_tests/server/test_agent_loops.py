"""SA-10: agents' loops of a dozen turns, on one process and on two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.server.anthropic.message_builder import MessageBuilder
from megatron_ext.server.openai.answers import Piece
from megatron_ext.server.openai.protocol import ChatRequest
from megatron_ext.server.openai.responses import ChatResponseBuilder
from megatron_ext.server.openai.responses_api.answer_events import ResponseAnswer
from megatron_ext.text import reasoning
from megatron_ext.text.tokenizer_files import ChatTemplates
from megatron_ext.text.tool_calls.formats import AnswerFormat, format_named
from megatron_ext.text.tool_calls.functions import Function
from megatron_ext.text.vocabulary import Vocabulary
from tests.on_request import long_except
from tests.unit_tests.support.agent_loop import (
    COMPACTION,
    SEVERAL,
    TURNS,
    WITHOUT_TOOLS,
    check_brief_cache,
    check_cache,
    play,
    play_briefly,
)
from tests.unit_tests.support.server import embedded_engine
from tests.unit_tests.text.tool_calls.test_tool_calls import ARGUMENTS, BARE, PARAMETERS, written

BLOCK = 16


def test_one_process(trained):
    """Each turn skips all whole blocks of the prompt and the answer before it, parallel calls included."""
    trained.reset_cache()
    first = play(trained.url)
    check_cache(first, BLOCK)
    assert first[0].cached == 0
    again = play(trained.url, turns=3)
    assert [turn.answer for turn in again] == [turn.answer for turn in first[:3]]
    assert all(turn.cached == (len(turn.prompt) - 1) // BLOCK * BLOCK for turn in again)
    assert [turn.calls for turn in first] == [2] * COMPACTION + [1] * (TURNS - COMPACTION - 1) + [0]


def test_a_template_without_tools(serve):
    """The generic form: calls are forced, several at once, and the next turn begins with the tokens of the last one."""
    engine = embedded_engine(is_whole=True)
    engine.controller.tokenizer._templates = ChatTemplates.only(WITHOUT_TOOLS, Path())
    server = serve(engine, "embedded")
    turns = play_briefly(server.url, **SEVERAL)
    check_brief_cache(turns, BLOCK, server.serving.chat_format.ends)
    assert turns[0].calls >= 2
    shown = server.serving.vocabulary.detokenize(turns[2].prompt, skip_special_tokens=False)
    assert shown.count("<|system|>") == 1
    assert shown.count("<tool_call>") == turns[0].calls + turns[1].calls + 2  # and in the instructions
    assert shown.count("<|user|><tool_response>") == 2, "results of a turn are one message"


# Writes arguments as JSON and each of their members, as templates do the one or the other.
BOTH_WAYS = """{%- for m in messages -%}<|user|>{{ m.content or "" }}{{ m.reasoning_content or "" }}
{%- for call in m.tool_calls or () %}{"arguments": {{ call.function.arguments | tojson }}}
{%- for key, value in call.function.arguments | items %}<{{ key }}={{ value }}>{% endfor %}
{%- endfor %}<|end|>{% endfor %}
{#- tools -#}"""
FUNCTIONS = (Function("weather", PARAMETERS), Function("time-now", {"type": "object"}))
ASKED, NEXT = {"role": "user", "content": "How is the weather?"}, {"role": "user", "content": "Go on."}
THOUGHT = "<think>\nThe <|end|> city.\n</think>\n\n"


def histories(answer: RequestRecord, form: AnswerFormat, vocabulary: Vocabulary) -> Iterator[tuple[str, dict]]:
    """Routes with the conversation that an answer continues there, as it came, and what its calls were given."""
    builder = ChatResponseBuilder(ChatRequest.model_construct(), "m", vocabulary, form)
    message = builder.choice(0, answer, answer)["message"]
    calls = [one["id"] for one in message.get("tool_calls", ())]
    results = [{"role": "tool", "tool_call_id": one, "content": "cut off"} for one in calls]
    yield "/tokenize", {"messages": [ASKED, message, *results, NEXT]}

    piece = Piece(answer.generated_text, reason=answer.finish_reason)
    response, builder = ResponseAnswer({}, form, vocabulary, "0" * 8), MessageBuilder("m", vocabulary, form)
    for answered in (response, builder):
        list(answered.feed(piece))
    calls = [one["call_id"] for one in response.output if one["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": one, "output": "cut off"} for one in calls]
    yield "/v1/responses/input_tokens", {"input": [ASKED, *response.output, *results, NEXT]}

    content = builder.message["content"]
    calls = [one["id"] for one in content if one["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": one, "content": "cut off"} for one in calls]
    said = {"role": "assistant", "content": content}
    yield "/v1/messages/count_tokens", {"messages": [ASKED, said, {"role": "user", "content": [*results, TEXT]}]}


TEXT = {"type": "text", "text": "Go on."}
NOTHING_ELSE = {"generated_log_probs": None, "generated_top_n_log_probs": None, "prompt_tokens": (), "stop_word": None}
NOTHING_ELSE |= {"skipped_prefill_token_count": 0, "prefill_reasons": {}, "params": None}


@pytest.mark.parametrize("name", long_except({"hermes"}, ["hermes", "mistral", "llama3_json", "lfm2", "qwen3_coder"]))
def test_an_answer_cut_anywhere_is_accepted_back(embedded, monkeypatch, name):
    """Arguments that are no JSON are shown as the model wrote them, the same on all routes."""
    tokenizer, vocabulary = embedded.serving.tokenizer, embedded.serving.vocabulary
    embedded.use_template(monkeypatch, BOTH_WAYS)
    calls = [("weather", ARGUMENTS["unicode"]), ("time-now", {"a": [{"b": None}]})]
    text = THOUGHT + written(name, calls, "" if name in BARE else "I look.")
    ids = tokenizer.tokenize(text)
    form = AnswerFormat(format_named(name), FUNCTIONS, 9, reasoning.format_named("think"))
    for count in range(1, len(ids) + 1):
        reason = "length" if count < len(ids) else "stop"
        cut = tokenizer.detokenize(ids[:count], skip_special_tokens=False)
        fields = {"generated_text": cut, "generated_tokens": tuple(ids[:count]), "finish_reason": reason}
        answer = SimpleNamespace(**NOTHING_ELSE | fields)  # of a request
        prompts = []
        for route, body in histories(answer, form, vocabulary):
            response = embedded.http.post(route, json=body)
            assert response.status_code == 200, (route, cut, response.text)
            prompts.append(response.json().get("count") or response.json()["input_tokens"])
        assert len(set(prompts)) == 1, (cut, prompts)


@pytest.mark.parametrize(
    "arguments",
    ['{"c', '"text"', "[1, 2]", "7", '{"a": NaN}', '{"a": "\\ud83d"}', "[" * 1100, '{"a": 1} and', "{'a': 1}"],
)
def test_arguments_that_are_no_object_are_shown_as_they_are(embedded, monkeypatch, arguments):
    """A template that writes JSON shows the text itself; one that writes members has one for it."""
    tokenizer = embedded.serving.tokenizer
    embedded.use_template(monkeypatch, BOTH_WAYS)
    function = {"name": "f", "arguments": arguments}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    items = [{"type": "function_call", "call_id": "c"} | function]
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"INVALID_JSON": arguments}}
    older = {"role": "assistant", "content": None, "function_call": function}
    shown = f'{{"arguments": {arguments}}}<INVALID_JSON={arguments}>'
    results = [{"role": "tool", "tool_call_id": "c", "content": "x"}, {"role": "function", "name": "f", "content": "x"}]
    for message, result in zip((call, older), results, strict=True):
        found = embedded.http.post("/tokenize", json={"messages": [ASKED, message, result]}).json()["tokens"]
        assert shown in tokenizer.detokenize(found, skip_special_tokens=False)
    for route, body in (
        ("/v1/chat/completions", {"messages": [ASKED, call, results[0]], "max_tokens": 1, "return_token_ids": True}),
        ("/v1/responses", {"input": [ASKED, *items], "max_output_tokens": 1, "return_token_ids": True}),
        ("/v1/messages", {"messages": [ASKED, {"role": "assistant", "content": [use]}, NEXT], "max_tokens": 1}),
    ):
        response = embedded.http.post(route, json=body)
        assert response.status_code == 200, response.text
        ids = response.json().get("prompt_token_ids")
        assert ids is None or shown in tokenizer.detokenize(ids, skip_special_tokens=False)
