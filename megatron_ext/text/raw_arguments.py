"""Arguments of tool calls that are no JSON object, as an answer that was cut off has them.

Templates take objects: some write them as JSON, others each of their members. So such arguments are an object with one
member, `INVALID_JSON`, whose value is the text. A template that writes it as JSON shows the text itself in its place,
as the model wrote it; any other shows the member.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence

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
