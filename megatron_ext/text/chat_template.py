"""Chat templates: rendering of conversations by the Jinja template of a model's tokenizer.

Templates are programs from a checkpoint: they run in the same sandbox as in transformers, with the same helpers, and in
a separate process (`template_rendering`).

They take the arguments of tool calls as objects: some write them as JSON, others each of their members. So arguments
that are no JSON object, as an answer that was cut off has them, are an object with one member, `INVALID_JSON`, whose
value is the text. A template that writes it as JSON shows the text itself in its place, as the model wrote it; any
other shows the member.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ext.errors import ConfigError
from megatron_ext.text.chat_tokens import ASSISTANT
from megatron_ext.text.template_rendering import RENDERER
from megatron_ext.text.template_worker import Rendering
from megatron_ext.text.tokenizer_files import SPECIAL_TOKENS

logger = logging.getLogger(__name__)

REASONING_EFFORT, ENABLE_THINKING, VERBOSITY = "reasoning_effort", "enable_thinking", "verbosity"
# Template variables that callers cannot set.
_RESERVED = frozenset(
    (
        *("messages", "conversations", "tools", "documents", "chat_template", "return_assistant_tokens_mask"),
        *("add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now"),
        *SPECIAL_TOKENS,
    )
)
LONGEST_VARIABLE = 64  # characters
_WORD = re.compile(r"\w+")
_PROBE = "Answer in verse."  # a system message


@dataclass(frozen=True)
class ChatOptions:
    """Template options beside the messages.

    Attributes:
        add_generation_prompt: Whether to end with the beginning of the model's answer.
        continue_final_message: Whether to end with the last message's content, so that the model continues it.
        tools: Functions that the model may call, in OpenAI's form.
        variables: Variables of the template itself.
        reasoning_effort: Value of the template's variable of this name, if it has one.
        verbosity: The same for the variable `verbosity`.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, object]] = ()
    variables: Mapping[str, object] = field(default_factory=dict)
    reasoning_effort: str | None = None
    verbosity: str | None = None

    def known_to(self, template: str) -> tuple[dict[str, object], list[str]]:
        """Return the variables that a template is rendered with, and the names of variables it does not mention."""
        given = dict(self.variables)
        mentioned = _words_of(template)
        unknown = [name for name in given if name not in mentioned]
        for name, value in ((REASONING_EFFORT, self.reasoning_effort), (VERBOSITY, self.verbosity)):
            if value is not None and name in mentioned:
                given.setdefault(name, value)
            elif name == REASONING_EFFORT and value == "none" and ENABLE_THINKING in mentioned:
                given.setdefault(ENABLE_THINKING, False)
            elif value is not None:
                unknown.append(name)
        return given, unknown

    def check(self) -> None:
        """Check names and ends.

        Raises:
            ConfigError: There are variables that are reserved or no identifiers, or two contradictory ends.
        """
        odd = next((name for name in self.variables if not name.isidentifier() or len(name) > LONGEST_VARIABLE), None)
        if odd is not None:
            shown = f"{odd[:LONGEST_VARIABLE]!r}{'...' * (len(odd) > LONGEST_VARIABLE)}"
            raise ConfigError(
                f"chat_template_kwargs: {shown} is not the name of a variable; give letters, digits and _, at most "
                f"{LONGEST_VARIABLE} characters"
            )
        reserved = sorted(_RESERVED & set(self.variables))
        if reserved:
            raise ConfigError(f"chat_template_kwargs: {reserved[0]} is reserved; leave it out")
        if self.add_generation_prompt and self.continue_final_message:
            raise ConfigError(
                "continue_final_message and add_generation_prompt contradict each other; give one of them"
            )


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, object]],
    special_tokens: Mapping[str, str],
    options: ChatOptions,
) -> str:
    """Render a conversation.

    Args:
        template: Jinja template.
        messages: Messages with a role, and a content or tool calls; other fields are passed to the template.
        special_tokens: See `read_special_tokens`.
        options: Template options.

    Raises:
        ConfigError: Messages are invalid or refused by the template, options are not accepted, or the template is
            broken, recurses without end, takes more than 5 s of CPU time, or makes more than 64 MB of text.
    """
    chat = _checked(messages)
    options.check()
    variables, unknown = options.known_to(template)
    for name in unknown:
        _note_unknown(name)
    chat, raw = with_placeholders(chat)
    tools = [dict(tool) for tool in options.tools]
    if not takes_tools(template) and (tools or _has_unknown_calls(template, chat)):
        in_system = bool(tools) and _shows_system(template, tuple(special_tokens.items()))
        chat, tools = spell_out(chat, tools, in_system=in_system), []
    settings = {
        "tools": tools or None,
        "add_generation_prompt": options.add_generation_prompt,
        "continue_final_message": options.continue_final_message,
    }
    return with_texts(RENDERER.render(Rendering(template, chat, settings, {**special_tokens, **variables})), raw)


def takes_tools(template: str) -> bool:
    """Return whether a template shows the tools of a request; `spell_out` describes them to others."""
    return "tools" in _words_of(template)


def _has_unknown_calls(template: str, chat: Sequence[Mapping[str, object]]) -> bool:
    """Return whether the assistant has called tools, and the template would leave that out."""
    calls = any(message["role"] == ASSISTANT and message.get("tool_calls") for message in chat)
    return calls and "tool_calls" not in _words_of(template)


@functools.lru_cache(maxsize=4)
def _shows_system(template: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    """Return whether a template shows system messages; some refuse them."""
    turns = (("system", _PROBE), ("user", "Hello"))
    probe: list[dict[str, object]] = [{"role": role, "content": text} for role, text in turns]
    try:
        return _PROBE in RENDERER.render(Rendering(template, probe, {}, dict(special_tokens)))
    except ConfigError:
        return False


@functools.lru_cache(maxsize=4)
def _words_of(template: str) -> frozenset[str]:
    """Return the words of a template, variables among them."""
    return frozenset(_WORD.findall(template))


@functools.lru_cache(maxsize=64)
def _note_unknown(name: str) -> None:
    """Log once that a variable has no effect."""
    logger.info("the chat template does not use %s; it is ignored", name)


def _checked(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return the messages without None fields, which some clients send for absent fields."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ConfigError('messages must be a list of at least one, as in [{"role": "user", "content": "Hello"}]')
    for index, message in enumerate(messages):
        where = f"message {index}"
        if not isinstance(message, Mapping):
            raise ConfigError(f"{where} is of type {type(message).__name__}; it must have a role and a content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ConfigError(f"{where} has role {role!r}; it must be a text such as 'user'")
        if content is None and not message.get("tool_calls"):
            raise ConfigError(f"{where} ({role}) has no content")
        if not isinstance(content, str | list | None):
            raise ConfigError(f"{where} ({role}) has a content of type {type(content).__name__}; it must be a text")
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


INVALID_JSON = "INVALID_JSON"


def with_placeholders(messages: Sequence[Mapping[str, object]]) -> tuple[list[dict[str, object]], dict[str, str]]:
    """Return messages whose raw arguments are replaced by random names, and the texts by these names."""
    texts: dict[str, str] = {}

    def replaced(call: object) -> object:
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(arguments, Mapping):
            return call
        text = arguments.get(INVALID_JSON)
        if len(arguments) != 1 or not isinstance(text, str):
            return call
        name = secrets.token_hex(16)
        texts[name] = text
        return {**call, "function": {**function, "arguments": {INVALID_JSON: name}}}

    found = [dict(message) for message in messages]
    for message in found:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message["tool_calls"] = [replaced(call) for call in calls]
    return found, texts


def with_texts(rendered: str, texts: Mapping[str, str]) -> str:
    """Return a rendered conversation with the texts in place of their names, and of the objects that have them."""
    if not texts:
        return rendered
    names = "|".join(texts)
    pattern = rf'\{{\s*"{INVALID_JSON}"\s*:\s*"(?P<whole>{names})"\s*\}}|(?P<name>{names})'
    return re.sub(pattern, lambda found: texts[found["whole"] or found["name"]], rendered)


# Generic form of tools, for templates without any: everything about them becomes text of messages. The system message
# describes the functions. Calls are text of the assistant, as `tool_calls.formats.HERMES` reads them and its grammar
# writes them, and results are messages of the user, since templates know few roles.
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


def spell_out(
    messages: Sequence[dict[str, object]], tools: Sequence[Mapping[str, object]], *, in_system: bool
) -> list[dict[str, object]]:
    """Return a conversation as messages of system, user and assistant without tools.

    Results that follow each other, and the user's text after them, are one message: some templates want turns.

    Args:
        messages: Conversation with tool calls and their results.
        tools: Functions that may be called; without any, only calls and results are spelled out.
        in_system: Whether the functions are described in the system message; in the first one of the user otherwise.

    Raises:
        ConfigError: A tool call has no name.
    """
    found: list[dict[str, object]] = []
    follows_result = False
    for index, message in enumerate(messages):
        role, is_result = message["role"], message["role"] == "tool"
        text = _RESULT.format(_content_of(message)) if is_result else _content_of(message)
        if follows_result and (is_result or role == "user"):
            found[-1]["content"] = f"{found[-1]['content']}\n{text}"
        elif is_result:
            found.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            others = {name: value for name, value in message.items() if name != "tool_calls"}
            found.append(others | {"content": "\n".join([*([text] if text else []), *_spelled_calls(message, index)])})
        else:
            found.append(message)
        follows_result = is_result
    return _with_instructions(found, tools, in_system=in_system) if tools else found


def _with_instructions(
    messages: list[dict[str, object]], tools: Sequence[Mapping[str, object]], *, in_system: bool
) -> list[dict[str, object]]:
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
    given = _content_of(messages[place])
    parts = (given, text) if in_system else (text, given)
    changed = {**messages[place], "content": "\n\n".join(part for part in parts if part)}
    return [*messages[:place], changed, *messages[place + 1 :]]


def _content_of(message: Mapping[str, object]) -> str:
    """Return the content of a message, whose parts are joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _spelled_calls(message: Mapping[str, object], index: int) -> list[str]:
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
