"""An agent's loop over HTTP: parallel calls, tools that fail, compaction, a structured answer at the end.

The embedded model was not trained to call functions: guided decoding forces the calls.
"""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Collection, Sequence
from dataclasses import dataclass

TURNS = 12
COMPACTION = 6  # the turn that begins with a summary
# A penalty for repeated tokens ends an answer after some calls; a bias for line breaks, which part them, makes it two.
SEVERAL = {"frequency_penalty": 2.0, "logit_bias": {"203": 14}}


def tool(name: str, **properties: object) -> dict:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "strict": True, "parameters": parameters}}


CITIES, LEVELS = ["Oslo", "Rome"], ["low", "high"]
TOOLS = [
    tool("lookup", city={"enum": CITIES}, days={"type": "integer", "minimum": 1, "maximum": 9}),
    tool("note", level={"enum": LEVELS}),
    tool("clock"),
]
CLOCK = {"type": "function", "function": {"name": "clock"}}  # a call without any choice of the model's
ANSWER = {"type": "object", "properties": {"city": {"enum": CITIES}, "level": {"enum": LEVELS}}}
ANSWER |= {"required": ["city", "level"], "additionalProperties": False}

# Thinking of earlier turns is dropped, except where tools answer a call of the same turn.
THINKING_TEMPLATE = """{%- if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == "assistant" -%}
<|assistant|>
{%- if m.reasoning_content and loop.index0 > ns.last -%}
{{ "<think>\\n" ~ m.reasoning_content ~ "\\n</think>\\n\\n" }}
{%- endif -%}
{{ m.content or "" }}
{%- for call in m.tool_calls or () -%}
{{ ("" if loop.first and not m.content else "\\n") ~ '<tool_call>\\n{"name": ' ~ (call.function.name | tojson) }}
{{- ', "arguments": ' ~ (call.function.arguments | tojson) ~ "}\\n</tool_call>" }}
{%- endfor -%}
<|end|>
{%- else -%}
<|user|>{{ m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% if reasoning_effort is defined %}{{ reasoning_effort }}: {% endif -%}
{%- if enable_thinking is defined and not enable_thinking %}{{ "<think>\\n\\n</think>\\n\\n" }}{% endif %}{% endif -%}
"""
# A template of the embedded model's that knows neither tools nor calls.
WITHOUT_TOOLS = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor -%}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
SYSTEM = {"role": "system", "content": "You plan journeys. Look up the weather, and take notes of what matters."}


@dataclass(frozen=True)
class Turn:
    """One answer: its prompt, its tokens, and what of the prompt was skipped."""

    prompt: list[int]
    answer: list[int]
    cached: int
    calls: int


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from None


def play(url: str, name: str = "", turns: int = TURNS) -> list[Turn]:
    """Play a loop, or its first turns; `name` makes its conversation different from others."""
    messages = [SYSTEM, {"role": "user", "content": f"Where should {name or 'I'} go, to Oslo or to Rome?"}]
    played = []
    for number in range(turns):
        is_parallel, is_last = number < COMPACTION, number == TURNS - 1
        if number == COMPACTION:
            messages = [SYSTEM, {"role": "user", "content": f"So far: {name} looked up both cities. Continue."}]
        body = {
            "model": "embedded",
            "messages": messages,
            "tools": TOOLS,
            "tool_choice": "none" if is_last else "required" if is_parallel else CLOCK,
            "parallel_tool_calls": is_parallel,
            "max_tokens": 200,
            "temperature": 0,
            "separate_reasoning": False,  # thinking is not part of the next prompt
            "return_token_ids": True,
        }
        body |= SEVERAL if is_parallel else {}
        body |= {"response_format": {"type": "json_schema", "json_schema": {"schema": ANSWER}}} if is_last else {}
        content = post(url, body)
        choice = content["choices"][0]
        calls = choice["message"].get("tool_calls", [])
        played.append(
            Turn(
                content["prompt_token_ids"],
                choice["token_ids"],
                content["usage"]["prompt_tokens_details"]["cached_tokens"],
                len(calls),
            )
        )
        if is_last:
            assert choice["finish_reason"] == "stop"
            answer = json.loads(choice["message"]["content"])
            assert answer["city"] in CITIES
            assert answer["level"] in LEVELS
            break
        assert choice["finish_reason"] == "tool_calls", choice
        assert len(calls) >= 2 if is_parallel else len(calls) == 1, choice
        messages = [*messages, {"role": "assistant", "content": None, "tool_calls": calls}]
        for place, call in enumerate(calls):
            result = run(call["function"]["name"], json.loads(call["function"]["arguments"]), fails=place == 1)
            messages.append({"role": "tool", "content": result, "tool_call_id": call["id"]})
    return played


def play_briefly(url: str, **fields: object) -> list[Turn]:
    """Play three turns with two tools: a call of any, a call of one by its name, an answer after both."""
    messages = [SYSTEM, {"role": "user", "content": "Should I go to Oslo?"}]
    note = {"type": "function", "function": {"name": "note"}}
    played: list[Turn] = []
    for choice in ("required", note, "none"):
        body = {"messages": messages, "tools": TOOLS[:2], "tool_choice": choice, "max_tokens": 120, "temperature": 0}
        content = post(url, body | {"return_token_ids": True} | fields)
        (answer,), usage = content["choices"], content["usage"]
        calls = answer["message"].get("tool_calls", [])
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        played.append(Turn(content["prompt_token_ids"], answer["token_ids"], cached, len(calls)))
        assert answer["finish_reason"] == "tool_calls" or choice == "none", answer
        assert choice != note or {call["function"]["name"] for call in calls} == {"note"}
        messages = [*messages, {name: answer["message"][name] for name in ("role", "content")}]
        if calls:
            messages[-1]["tool_calls"] = calls
        for call in calls:
            result = run(call["function"]["name"], json.loads(call["function"]["arguments"]), fails=False)
            messages.append({"role": "tool", "content": result, "tool_call_id": call["id"]})
    return played


def check_brief_cache(turns: Sequence[Turn], block: int, ends: Collection[int]) -> None:
    """Check that each turn begins with the tokens of the turn before, and has skipped all whole blocks of them."""
    assert len(turns) == 3
    assert turns[0].calls >= 1
    assert turns[1].calls >= 1
    assert turns[2].calls == 0
    for before, turn in itertools.pairwise(turns):
        is_ended = before.answer[-1] in ends
        known = [*before.prompt, *(before.answer[:-1] if is_ended else before.answer)]
        assert turn.prompt[: len(known)] == known
        assert turn.cached == (len(before.prompt) + len(before.answer) - 1) // block * block > 0


def run(name: str, arguments: dict, *, fails: bool) -> str:
    """Result of a tool, whose arguments have to follow its schema."""
    if name == "lookup":
        assert arguments["city"] in CITIES
        assert 1 <= arguments["days"] <= 9
    elif name == "note":
        assert arguments["level"] in LEVELS
    else:
        assert (name, arguments) == ("clock", {})
    return "error: the service did not answer; try again" if fails else json.dumps({"ok": True, **arguments})


def check_cache(turns: Sequence[Turn], block: int) -> None:
    """Check what each turn skipped: all whole blocks of the turn before, and the shared head after the compaction.

    A model that was not trained to call functions may spell a name in other tokens than the tokenizer, which reads the
    next prompt: then the turn skips the prompt before it, and not what follows. Calls without a choice repeat exactly.
    """
    assert len(turns) == TURNS
    for number, (before, turn) in enumerate(itertools.pairwise(turns), start=1):
        known = [*before.prompt, *before.answer[:-1]]  # the last token ended the answer and was not computed
        common = next((i for i, (a, b) in enumerate(zip(known, turn.prompt, strict=False)) if a != b), len(known))
        if common == len(known):
            assert turn.cached == common // block * block, number
            continue
        assert number <= COMPACTION, f"turn {number} does not repeat the call before it"
        is_kept = number != COMPACTION  # a router may send what begins anew to another replica
        least = (len(before.prompt) - 1) // block * block if is_kept else 0
        assert least <= turn.cached <= common // block * block, number
