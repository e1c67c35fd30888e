"""Generic form of tools, for chat templates without any: everything about them becomes text of messages.

The system message describes the functions. Calls are text of the assistant, as `tool_calls.formats.HERMES` reads them
and its grammar writes them, and results are messages of the user, since templates know few roles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from megatron_ext.errors import ConfigError

Message = dict[str, object]

_CALL = '<tool_call>\n{{"name": {}, "arguments": {}}}\n</tool_call>'
_RESULT = "<tool_response>\n{}\n</tool_response>"
# The words of Qwen's templates, which many models have been trained with.
_INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
{}"""


def spell_out(messages: Sequence[Message], tools: Sequence[Mapping[str, object]], *, in_system: bool) -> list[Message]:
    """Return a conversation as messages of system, user and assistant without tools.

    Results that follow each other, and the user's text after them, are one message: some templates want turns.

    Args:
        messages: Conversation with tool calls and their results.
        tools: Functions that may be called; without any, only calls and results are spelled out.
        in_system: Whether the functions are described in the system message; in the first one of the user otherwise.

    Raises:
        ConfigError: A tool call has no name.
    """
    found: list[Message] = []
    follows_result = False
    for index, message in enumerate(messages):
        role, is_result = message["role"], message["role"] == "tool"
        text = _RESULT.format(_text(message)) if is_result else _text(message)
        if follows_result and (is_result or role == "user"):
            found[-1]["content"] = f"{found[-1]['content']}\n{text}"
        elif is_result:
            found.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            others = {name: value for name, value in message.items() if name != "tool_calls"}
            found.append(others | {"content": "\n".join([*([text] if text else []), *_calls(message, index)])})
        else:
            found.append(message)
        follows_result = is_result
    return _with_instructions(found, tools, in_system=in_system) if tools else found


def _with_instructions(
    messages: list[Message], tools: Sequence[Mapping[str, object]], *, in_system: bool
) -> list[Message]:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(listed, _CALL.format("<function-name>", "<args-json-object>"))
    if in_system:
        place, role = 0, "system"
        has_place = messages[0]["role"] in ("system", "developer")
    else:
        place, role = next((i for i, one in enumerate(messages) if one["role"] == "user"), 0), "user"
        has_place = messages[place]["role"] == role
    if not has_place:
        return [*messages[:place], {"role": role, "content": text}, *messages[place:]]
    given = _text(messages[place])
    parts = (given, text) if in_system else (text, given)
    changed = {**messages[place], "content": "\n\n".join(part for part in parts if part)}
    return [*messages[:place], changed, *messages[place + 1 :]]


def _text(message: Mapping[str, object]) -> str:
    """Return the content of a message, whose parts are joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _calls(message: Mapping[str, object], index: int) -> list[str]:
    """Return the calls of a message, spelled as templates with tools spell them."""
    calls, spelled = message["tool_calls"], []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise ConfigError(f"message {index} (assistant) has a tool call without a function's name")
        given = function.get("arguments", {})
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        spelled.append(_CALL.format(json.dumps(name, ensure_ascii=False), arguments))
    return spelled
