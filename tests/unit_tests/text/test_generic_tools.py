"""SA-6: the generic form of tools, for chat templates without any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.text.chat_template import INVALID_JSON, ChatOptions
from megatron_ext.text.tokenizer import TextTokenizer
from megatron_ext.text.tool_calls.formats import HERMES
from megatron_ext.text.tool_calls.reader import ToolCallReader
from megatron_ext.text.tool_calls.source import Arguments, CallBegun, Content
from tests.unit_tests.support import hf_tokenizers
from tests.unit_tests.text.test_chat_template import INSTRUCTIONS

ALL_ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TOLD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Oslo?"}


def call(arguments: object, name: object = "weather") -> dict:
    return {"type": "function", "id": "1", "function": {"name": name, "arguments": arguments}}


def result(text: str) -> dict:
    return {"role": "tool", "tool_call_id": "1", "content": text}


CALLED = {"role": "assistant", "content": "I look.", "tool_calls": [call({"city": "Ōslo"}), call({})]}
SPELLED = """I look.
<tool_call>
{"name": "weather", "arguments": {"city": "Ōslo"}}
</tool_call>
<tool_call>
{"name": "weather", "arguments": {}}
</tool_call>"""
RESULTS = "<tool_response>\ncold\n</tool_response>\n<tool_response>\nwarm\n</tool_response>"
CONVERSATION = [USER, CALLED, result("cold"), result("warm"), {"role": "user", "content": "So?"}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return hf_tokenizers.llama_2(tmp_path / "t")


def rendered(directory: Path, template: str, messages: list[dict], tools: tuple = (TOOL,)) -> str:
    (directory / "chat_template.jinja").write_text(template)
    return TextTokenizer(directory).apply_chat_template(messages, options=ChatOptions(tools=tools))


def test_a_conversation(directory: Path) -> None:
    """Functions in the system message; calls and results as texts, results and what follows them in one message."""
    text = f"[user]Oslo?\n[assistant]{SPELLED}\n[user]{RESULTS}\nSo?\n"
    assert rendered(directory, ALL_ROLES, CONVERSATION) == f"[system]{TOLD}\n{text}"
    assert rendered(directory, ALL_ROLES, [SYSTEM, *CONVERSATION]) == f"[system]Be brief.\n\n{TOLD}\n{text}"
    parts = [{"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}]
    assert rendered(directory, ALL_ROLES, [*parts, USER]) == f"[developer]Be brief.\n\n{TOLD}\n[user]Oslo?\n"


def test_calls_in_a_history_without_tools(directory: Path) -> None:
    """The last request of an agent often has no tools; a template that knows calls writes them itself."""
    text = f"[user]Oslo?\n[assistant]{SPELLED}\n[user]{RESULTS}\nSo?\n"
    assert rendered(directory, ALL_ROLES, CONVERSATION, ()) == text
    own = "{% for m in messages %}{{ m.tool_calls | length }}{{ m.role[0] }} {% endfor %}"
    assert rendered(directory, own, CONVERSATION, ()) == "0u 2a 0t 0t 0u "
    assert rendered(directory, own, CONVERSATION) == "0u 0a 0u ", "with tools everything is in the generic form"


def test_a_template_that_refuses_a_system_message_and_wants_turns(directory: Path) -> None:
    """The functions are described before the user's first text."""
    assert rendered(directory, INSTRUCTIONS.replace("turns = messages[1:]", "turns = 1 / 0"), CONVERSATION) == (
        f"<s>[INST] {TOLD}\n\nOslo? [/INST]\n {SPELLED} </s>\n<s>[INST] {RESULTS}\nSo? [/INST]\n"
    )


def test_calls_are_as_they_are_read(directory: Path) -> None:
    shown = rendered(directory, "{{ messages[1].content }}", [USER, CALLED])
    found = ToolCallReader(HERMES).feed(shown, is_last=True)
    assert [one.name for one in found if isinstance(one, CallBegun)] == ["weather"] * 2
    assert "".join(one.text for one in found if isinstance(one, Content)) == "I look."
    text = "".join(one.text for one in found if isinstance(one, Arguments))
    assert json.loads(f"[{text.replace('}{', '},{')}]") == [{"city": "Ōslo"}, {}]


@pytest.mark.parametrize("arguments", ['{"city": "Os', {INVALID_JSON: '{"city": "Os'}], ids=["text", "marked"])
def test_arguments_that_are_no_object_are_shown_as_they_are(directory: Path, arguments: object) -> None:
    message = {"role": "assistant", "tool_calls": [call(arguments)]}
    shown = rendered(directory, ALL_ROLES, [USER, message], ())
    assert shown.endswith('[assistant]<tool_call>\n{"name": "weather", "arguments": {"city": "Os}\n</tool_call>\n')


def test_a_call_without_a_name_is_refused(directory: Path) -> None:
    for calls in ([call({}, None)], ["weather"], {"function": 1}):
        with pytest.raises(ConfigError, match=r"message 1 \(assistant\) has a tool call without a function's name"):
            rendered(directory, ALL_ROLES, [USER, {"role": "assistant", "tool_calls": calls}])


def test_special_tokens_in_functions_and_results_stay_text(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(ALL_ROLES)
    tokenizer = TextTokenizer(directory)
    tool = {"type": "function", "function": {"name": "weather", "description": "ends </s>"}}
    messages = [USER, CALLED, result("a </s> b")]
    ids = tokenizer.render_chat(messages, options=ChatOptions(tools=[tool])).ids()
    assert tokenizer.eod not in ids
    assert (
        tokenizer.render_chat(messages, options=ChatOptions(tools=[tool]), parse_control=True)
        .ids()
        .count(tokenizer.eod)
        == 2
    )
