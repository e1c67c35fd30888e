"""Checker of the Messages API, written from its description: the order of events, and what they add up to."""

from __future__ import annotations

import json
from collections.abc import Sequence

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
DELTAS = {"text": {"text_delta"}, "thinking": {"thinking_delta", "signature_delta"}, "tool_use": {"input_json_delta"}}
EMPTY = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}
USAGE = {"input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"}
REASONS = {"end_turn", "max_tokens", "stop_sequence", "tool_use"}


def events_of(text: str) -> list[dict]:
    """The contents of a stream's events, each of which is named as its type."""
    events = []
    for one in text.removesuffix("\n\n").split("\n\n"):
        name, data = one.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        events.append(json.loads(data.removeprefix("data: ")))
        assert events[-1]["type"] == name.removeprefix("event: ")
    return events


def summed(text: str) -> dict:
    """The message that a stream adds up to."""
    events = [one for one in events_of(text) if one["type"] != "ping"]
    first, *blocks, delta, last = events
    assert (first["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    message = first["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    assert set(message["usage"]) == USAGE
    open_block, arguments = None, ""
    for event in blocks:
        if event["type"] == "content_block_start":
            assert open_block is None
            assert event["index"] == len(message["content"])
            open_block, arguments = event["content_block"], ""
            kind = open_block["type"]
            assert EMPTY[kind].items() <= open_block.items()
            message["content"].append(open_block)
            continue
        assert open_block is not None
        assert event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_stop":
            if arguments:
                open_block["input"] = json.loads(arguments)
            open_block = None
            continue
        assert event["type"] == "content_block_delta"
        (name, new), *others = [item for item in event["delta"].items() if item[0] != "type"]
        assert not others
        assert event["delta"]["type"] in DELTAS[open_block["type"]]
        if name == "partial_json":
            arguments += new
        else:
            open_block[name] += new
    assert open_block is None
    assert set(delta["delta"]) == {"stop_reason", "stop_sequence"}
    started = message["usage"] | {"output_tokens": 0}
    assert delta["usage"] | {"output_tokens": 0} == started | {
        name: value for name, value in delta["usage"].items() if name == "output_tokens_details"
    } | {"output_tokens": 0}, "the prompt's counts are known when the answer begins"
    message |= delta["delta"]
    message["usage"] = delta["usage"]
    return message


def checked(message: dict) -> dict:
    """A whole message, which has the fields of one."""
    assert set(message) == {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["id"].startswith("msg_")
    assert message["stop_reason"] in REASONS
    assert (message["stop_sequence"] is not None) == (message["stop_reason"] == "stop_sequence")
    assert USAGE <= set(message["usage"]) <= USAGE | {"output_tokens_details"}
    assert all(block["id"].startswith("toolu_") for block in message["content"] if block["type"] == "tool_use")
    return message


def without_ids(message: dict) -> dict:
    """The message, which does not repeat its random ids."""
    return message | {
        "id": "",
        "content": [{name: value for name, value in block.items() if name != "id"} for block in message["content"]],
    }


def create(server, *, stream: bool = False, headers: dict | None = None, **fields: object) -> dict:
    """The answer of a server to a request."""
    body = {"model": "embedded", "max_tokens": 24, "temperature": 0} | fields | ({"stream": True} if stream else {})
    answer = server.http.post(MESSAGES, json=body, headers={"anthropic-version": "2023-06-01"} | (headers or {}))
    assert answer.status_code == 200, answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    if stream:
        assert answer.headers["content-type"].startswith("text/event-stream")
        return checked(summed(answer.text))
    return checked(answer.json())


def text_of(message: dict) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def prompt_tokens(message: dict) -> int:
    return sum(message["usage"][name] for name in USAGE - {"output_tokens"})


def check_envelope(answer, status: int, kind: str) -> dict:
    """The error object of an answer."""
    assert answer.status_code == status, answer.text
    content = answer.json()
    assert set(content) == {"type", "error", "request_id"}
    assert content["type"] == "error"
    assert content["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"] != ""
    assert content["error"]["type"] == kind, content
    assert set(content["error"]) <= {"type", "message", "code", "details"}
    assert content["error"]["message"]
    return content["error"]


def contents(*texts: str) -> Sequence[dict]:
    """A conversation of users and assistants in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
