"""LiteLLM: `completion` with tools, a response format, streams, and errors by its own classes."""

import json
import os
from typing import Literal

import litellm
from pydantic import BaseModel

QUESTION = {"role": "user", "content": "What is the weather in Oslo, and what time is it?"}


class Answer(BaseModel):
    city: Literal["Oslo"]
    sky: Literal["clear"]


def tool(name: str, **properties) -> dict:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters | {"additionalProperties": False}}}


TOOLS = [
    tool("get_weather", city={"type": "string", "enum": ["Oslo"]}),
    tool("get_time", zone={"type": "string", "enum": ["UTC"]}),
]
NAMED = {"type": "function", "function": {"name": "get_time"}}


def complete(**body):
    return litellm.completion(
        **{"model": f"openai/{os.environ['MODEL']}", "messages": [QUESTION]} | body,
        api_base=f"{os.environ['BASE_URL']}/v1",
        api_key=os.environ["API_KEY"],
        num_retries=0,
    )


pieces = []


def stream(**body):
    chunks = list(complete(**body, stream=True, stream_options={"include_usage": True}))
    contents = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    pieces[:] = filter(None, contents)
    return litellm.stream_chunk_builder(chunks, messages=body["messages"])


def loop(ask, **options) -> tuple[list, str]:
    """Ask until an answer has no calls; return the calls of each answer, and the last answer."""
    messages, turns = [QUESTION], []
    while True:
        message = ask(messages=messages, tools=TOOLS, **options).choices[0].message
        if not message.tool_calls:
            return turns, message.content
        turns.append([[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls])
        if "tool_choice" in options:
            return turns, ""
        messages = [*messages, message]
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear", "time": "12:00"}'})


def error(**body) -> str:
    try:
        complete(**body)
    except (litellm.NotFoundError, litellm.BadRequestError) as error:
        return f"{type(error).__name__} {error.status_code}"
    return "no error"


parallel, text = loop(complete)
streamed, streamed_text = loop(stream)
assert streamed_text == text == "".join(pieces), (text, streamed_text, pieces)
facts = {
    "parallel": parallel,
    "one_by_one": loop(complete, parallel_tool_calls=False)[0],
    "forced": loop(complete, tool_choice=NAMED)[0],
    "answer": json.loads(loop(complete, response_format=Answer)[1]),
    "stream": streamed,
    "stream_text": streamed_text,
    "stream_in_pieces": len(pieces) > 1,
    "errors": {
        "model": error(model="openai/unknown"),
        "length": error(messages=[{"role": "user", "content": "word " * 9000}]),
    },
}
print(json.dumps(facts))
