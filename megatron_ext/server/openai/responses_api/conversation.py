"""Input items of the Responses API, and the messages of a chat that they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter

from megatron_ext.server.api_errors import LONGEST_NAME, ApiError
from megatron_ext.server.openai.protocol import LONGEST_TOOL_NAME, Message
from megatron_ext.server.openai.request_fields import MAX_MESSAGES, LenientObject, Text

# Types of parts that are texts, and the field that has the text.
_TEXT_PARTS = {
    **dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), "text"),
    "refusal": "refusal",
}
_SYSTEM = ("system", "developer")


def text_of(value: object) -> object:
    """Return a content as one text; a value that is neither a text nor a list is left to the next check.

    Raises:
        ValueError: A part is not a text.
    """
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if name is None:
            shown = json.dumps(kind)[:LONGEST_NAME]
            raise ValueError(f"has a part of type {shown}; only texts are supported: {', '.join(_TEXT_PARTS)}")
        text = part.get(name)
        if not isinstance(text, str):
            raise ValueError(f"has a part of type {kind} whose {name} is not a text")
        texts.append(text)
    return "".join(texts)


Content = Annotated[Text, BeforeValidator(text_of, json_schema_input_type=str | list[dict[str, Any]])]


class InputItem(LenientObject):
    """Base of items."""


class MessageItem(InputItem):
    """Message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    """Author of the message."""
    content: Content
    """Text of the message, or its parts."""


class FunctionCallItem(InputItem):
    """Call that the model has made."""

    type: Literal["function_call"]
    call_id: Text
    """Id of a call, which its result repeats."""
    name: Annotated[Text, Field(min_length=1, max_length=LONGEST_TOOL_NAME)]
    """Name of the function."""
    arguments: Text
    """Arguments of a call, as JSON."""


class FunctionOutputItem(InputItem):
    """Result of a call."""

    type: Literal["function_call_output"]
    call_id: Text
    """Id of a call, which its result repeats."""
    output: Content
    """Result of a call."""


class ReasoningItem(InputItem):
    """Thinking of the model; its summary counts if there is nothing else."""

    type: Literal["reasoning"]
    content: Content | None = None
    """Thinking of an earlier answer."""
    summary: Content | None = None
    """Accepted without effect."""


class ItemReference(InputItem):
    """Reference to an item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: Text
    """Id of a stored item."""


class HostedItem(InputItem):
    """Work of a tool that only other servers have; it is left out of the conversation."""

    type: Literal[
        "web_search_call",
        "file_search_call",
        "computer_call",
        "computer_call_output",
        "code_interpreter_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "compaction",
    ]


_KINDS: dict[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
}
_HOSTED = frozenset(get_args(HostedItem.model_fields["type"].annotation))


def _kind_of(value: object) -> object:
    """Return the type of an item; messages and references may leave theirs out."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind is not None:
        return kind
    return "item_reference" if "id" in value and "role" not in value else "message"


def _tag_of(value: object) -> str:
    kind = _kind_of(value)
    is_hosted = isinstance(kind, str) and kind in _HOSTED
    return f"type {'hosted' if is_hosted else kind}"  # error messages leave names with spaces out of places


def input_items(value: object) -> object:
    """Return an input as a list of items: a text is the message of a user.

    Raises:
        ValueError: The input is neither, has too many items, or one of an unsupported type.
    """
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of items")
    if len(value) > MAX_MESSAGES:
        raise ValueError(f"has {len(value)} items; at most {MAX_MESSAGES} are allowed")
    value = [_as_function(item) for item in value]
    for item in value:
        kind = _kind_of(item)
        if not isinstance(kind, str) or kind not in {*_KINDS, *_HOSTED}:
            shown = "that is no object" if kind is None else f"of type {json.dumps(kind)[:LONGEST_NAME]}"
            raise ValueError(f"has an item {shown}; the types that are supported are {', '.join(_KINDS)}")
    return value


def _as_function(item: object) -> object:
    """Return a custom tool's call or result as a function's; its text is the argument `input`."""
    if isinstance(item, dict) and item.get("type") == "custom_tool_call" and isinstance(item.get("input"), str):
        return item | {"type": "function_call", "arguments": json.dumps({"input": item["input"]}, ensure_ascii=False)}
    if isinstance(item, dict) and item.get("type") == "custom_tool_call_output":
        return item | {"type": "function_call_output"}
    return item


Item = Annotated[
    Annotated[MessageItem, Tag("type message")]
    | Annotated[FunctionCallItem, Tag("type function_call")]
    | Annotated[FunctionOutputItem, Tag("type function_call_output")]
    | Annotated[ReasoningItem, Tag("type reasoning")]
    | Annotated[ItemReference, Tag("type item_reference")]
    | Annotated[HostedItem, Tag("type hosted")],
    Discriminator(_tag_of),
]
Items = Annotated[
    Annotated[list[Item], Field(max_length=MAX_MESSAGES, fail_fast=True)],
    BeforeValidator(input_items, json_schema_input_type=str | list[dict[str, Any]]),
]


_ADAPTER: TypeAdapter[list[InputItem]] = TypeAdapter(Items)  # type: ignore[arg-type]  # a list of its subclasses


def items_of(values: Sequence[object]) -> list[InputItem]:
    """Return items from JSON values that have been checked before."""
    return _ADAPTER.validate_python(list(values))


def messages_of(items: Sequence[InputItem], instructions: str | None = None) -> list[Message]:
    """Return the messages of a conversation.

    Instructions and the messages of system and developer at the beginning are one message of the system, since many
    templates take no second one. The thinking, text and calls of one answer are one message of the assistant.

    Args:
        items: Items without references.
        instructions: Text before them.

    Raises:
        ApiError: There is no message, or a result comes before its call.
    """
    head = [] if instructions is None else [instructions]
    rest = list(items)
    while rest and isinstance(first := rest[0], MessageItem) and first.role in _SYSTEM:
        head.append(first.content)
        rest.pop(0)
    turns: list[dict[str, Any]] = [{"role": "system", "content": "\n\n".join(head)}] if head else []
    known: set[str] = set()  # ids of calls
    last: InputItem | None = None  # of the answer to which the next item may belong
    for item in rest:
        if isinstance(item, HostedItem):
            continue
        if isinstance(item, FunctionOutputItem):
            if item.call_id not in known:
                result = f"function_call_output of call_id {item.call_id[:LONGEST_NAME]!r}"
                raise ApiError(400, f"input: no function_call before the {result} has it", param="input")
            last = None
            turns.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            last = None
            turns.append({"role": "system" if item.role in _SYSTEM else item.role, "content": item.content})
        else:
            if last is None or not _continues(turns[-1], item, last):
                turns.append({"role": "assistant", "content": [], "tool_calls": [], "reasoning_content": []})
            last = item
            _add(turns[-1], item)
            if isinstance(item, FunctionCallItem):
                known.add(item.call_id)
    if not turns:
        raise ApiError(400, "input: is empty; give a text or items", param="input")
    return [Message(**_without_empty(turn)) for turn in turns]


def _continues(turn: Mapping[str, Any], item: InputItem, last: InputItem) -> bool:
    """Return whether an item belongs to the same answer as the last: thinking comes first, and no two texts follow."""
    if isinstance(item, ReasoningItem):
        return not turn["content"] and not turn["tool_calls"]
    return not (isinstance(item, MessageItem) and isinstance(last, MessageItem))


def _add(turn: dict[str, Any], item: InputItem) -> None:
    """Add an item to the message of its answer, whose texts are lists of parts so far."""
    if isinstance(item, MessageItem):
        turn["content"].append(item.content)
    elif isinstance(item, ReasoningItem):
        turn["reasoning_content"].append(item.content or item.summary or "")
    elif isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        turn["tool_calls"].append({"id": item.call_id, "type": "function", "function": function})


def _without_empty(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a message's fields; the text of an answer is missing where there are only calls."""
    if turn["role"] != "assistant":
        return turn
    content = "".join(turn["content"]) or (None if turn["tool_calls"] else "")
    thinking = "".join(turn["reasoning_content"]) or None
    return turn | {"content": content, "tool_calls": turn["tool_calls"] or None, "reasoning_content": thinking}
