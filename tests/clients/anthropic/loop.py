"""`anthropic` for Python: the tool runner, parsed answers, streams, token counts, errors."""

import json
import os
from typing import Literal

import anthropic
from anthropic import beta_tool
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"], max_retries=0)
MODEL = os.environ["MODEL"]
QUESTION = {"role": "user", "content": "What is the weather in Oslo, and what time is it?"}


def schema(**values: str) -> dict:
    properties = {name: {"type": "string", "enum": [value]} for name, value in values.items()}
    return {"type": "object", "properties": properties, "required": list(values), "additionalProperties": False}


@beta_tool(name="get_weather", description="Weather of a city", input_schema=schema(city="Oslo"))
def get_weather(city: str) -> str:
    return "clear"


@beta_tool(name="get_time", description="Time of a zone", input_schema=schema(zone="UTC"))
def get_time(zone: str) -> str:
    return "12:00"


TOOLS = [get_weather, get_time]


class Answer(BaseModel):
    city: Literal["Oslo"]
    sky: Literal["clear"]


def calls(message) -> list:
    return [[block.name, block.input] for block in message.content if block.type == "tool_use"]


def body(**options) -> dict:
    return {"model": MODEL, "max_tokens": 200, "messages": [QUESTION]} | options


def loop(**options) -> tuple[list, object]:
    """Run the tools until an answer has no calls; return the calls of each answer, and the last message."""
    messages = list(client.beta.messages.tool_runner(**body(tools=TOOLS, **options)))
    return [calls(message) for message in messages if calls(message)], messages[-1]


def stream() -> tuple[list, list]:
    """Return the calls of each streamed answer, and the pieces of the last answer."""
    turns, pieces = [], []
    for one in client.beta.messages.tool_runner(**body(tools=TOOLS, stream=True)):
        pieces = [event.text for event in one if event.type == "text"]
        message = one.get_final_message()
        turns += [calls(message)] if calls(message) else []
    return turns, pieces


def error(**options) -> str:
    try:
        client.messages.create(**body(**options))
    except anthropic.APIStatusError as error:
        kind, message = error.body["error"]["type"], error.body["error"]["message"]
        words = message.split(":")[0] if kind == "invalid_request_error" else ""
        return f"{type(error).__name__} {error.status_code} {kind} {words}".strip()
    return "no error"


parallel, message = loop(system="Be brief.")
assert message.stop_reason == "end_turn", message
assert message.usage.input_tokens > 0, message.usage
counted = client.messages.count_tokens(model=MODEL, messages=[QUESTION]).input_tokens
whole = client.messages.create(**body(max_tokens=1)).usage
forced = client.messages.create(
    **body(tools=[tool.to_dict() for tool in TOOLS], tool_choice={"type": "tool", "name": "get_time"})
)
structured = client.messages.parse(**body(output_format=Answer))
streamed, pieces = stream()
facts = {
    "parallel": parallel,
    "one_by_one": loop(tool_choice={"type": "auto", "disable_parallel_tool_use": True})[0],
    "forced": [calls(forced)],
    "answer": structured.parsed_output.model_dump(),
    "stream": streamed,
    "stream_text": "".join(pieces),
    "stream_in_pieces": len(pieces) > 1,
    "counts_agree": counted == whole.input_tokens + whole.cache_read_input_tokens + whole.cache_creation_input_tokens,
    "errors": {
        "model": error(model="unknown"),
        "length": error(messages=[{"role": "user", "content": "word " * 9000}]),
    },
}
print(json.dumps(facts))
