"""Checker of streams of the Responses API, written from the API's description and not from the server."""

from __future__ import annotations

import json
import re

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

EVENTS: TypeAdapter = TypeAdapter(ResponseStreamEvent)
ENDS = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}
TEXTS = {"message": ("response.output_text", "output_text"), "reasoning": ("response.reasoning_text", "reasoning_text")}


def events_of(stream: str) -> list[dict]:
    """Events of a stream, each named as its type, numbered, and valid by the types of OpenAI's client."""
    blocks = stream.removesuffix("\n\n").split("\n\n")
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENTS.validate_python(event)
        events.append(event)
    return events


def check_stream(stream: str) -> dict:
    """Check the order and the sums of the events of a whole stream; return the response of the last one."""
    events = events_of(stream)
    created, started, *middle, last = events
    assert [created["type"], started["type"]] == ["response.created", "response.in_progress"]
    for event in (created, started):
        response = event["response"]
        assert (response["status"], response["output"], response["usage"]) == ("in_progress", [], None)
        assert response["id"] == last["response"]["id"]
    assert last["response"]["status"] == ENDS[last["type"]]
    output = []
    rest = iter(middle)
    for event in rest:
        assert (event["type"], event["output_index"]) == ("response.output_item.added", len(output))
        output.append(_item(event["item"], len(output), rest))
    assert output == last["response"]["output"]
    ids = [item["id"] for item in output]
    assert len(set(ids)) == len(ids)
    check_response(last["response"])
    return last["response"]


def _item(begun: dict, index: int, rest) -> dict:
    """The finished item, whose events come one after the other."""
    assert begun["status"] == "in_progress"
    place = {"item_id": begun["id"], "output_index": index}
    if begun["type"] == "function_call":
        assert begun["arguments"] == ""
        prefix, whole = "response.function_call_arguments", "arguments"
    else:
        assert begun["content"] == []
        prefix, kind = TEXTS[begun["type"]]
        whole = "text"
        place["content_index"] = 0
        added = next(rest)
        assert (added["type"], added["part"]["type"], added["part"]["text"]) == (
            "response.content_part.added",
            kind,
            "",
        )
        assert added.items() >= place.items()
    text, scores = "", []
    for event in rest:
        assert event.items() >= place.items()
        if event["type"] != f"{prefix}.delta":
            break
        text += event["delta"]
        scores += event.get("logprobs", [])
    assert (event["type"], event[whole]) == (f"{prefix}.done", text)
    assert event.get("logprobs", []) == scores
    if begun["type"] != "function_call":
        part = next(rest)
        assert part["type"] == "response.content_part.done"
        assert part.items() >= place.items()
        assert part["part"]["text"] == text
        assert part["part"].get("logprobs", []) == scores
    done = next(rest)
    assert (done["type"], done["output_index"]) == ("response.output_item.done", index)
    item = done["item"]
    assert {name: item[name] for name in ("id", "type")} == {name: begun[name] for name in ("id", "type")}
    assert item["status"] in ("completed", "incomplete")
    if begun["type"] == "function_call":
        assert (item["arguments"], item["name"], item["call_id"]) == (text, begun["name"], begun["call_id"])
    else:
        assert item["content"] == [part["part"]]
    return item


def check_response(response: dict) -> None:
    """Check a response that has ended: its ids, its usage, and its types by OpenAI's client."""
    Response.model_validate(response)
    assert re.fullmatch(r"resp_[0-9a-f]{40}", response["id"])
    for item in response["output"]:
        assert re.fullmatch(r"(msg|rs|fc)_[0-9a-f]{40}", item["id"])
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert (response["incomplete_details"] is not None) == (response["status"] == "incomplete")


def without_ids(response: dict) -> dict:
    """A response without what differs from one request to the next."""
    text = json.dumps({name: value for name, value in response.items() if not name.endswith("_at")})
    return json.loads(re.sub(r"\b(resp|msg|rs|fc|call)_[0-9a-f]{24,40}", r"\1", text))
