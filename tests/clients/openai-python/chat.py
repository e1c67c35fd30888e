"""Chat completions with `openai` for Python: function calling, parsed answers, streams, errors."""

import json
import os
from typing import Literal

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{os.environ['BASE_URL']}/v1", api_key=os.environ["API_KEY"], max_retries=0)
MODEL = os.environ["MODEL"]
QUESTION = {"role": "user", "content": "What is the weather in Oslo, and what time is it?"}


class GetWeather(BaseModel):
    """Weather of a city."""

    city: Literal["Oslo"]


class GetTime(BaseModel):
    """Time of a zone."""

    zone: Literal["UTC"]


class Answer(BaseModel):
    city: Literal["Oslo"]
    sky: Literal["clear"]


TOOLS = [
    openai.pydantic_function_tool(GetWeather, name="get_weather"),
    openai.pydantic_function_tool(GetTime, name="get_time"),
]


def result(call) -> dict:
    return {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sky": "clear", "time": "12:00"})}


def loop(ask, **options) -> tuple[list, object]:
    """Ask until an answer has no calls; return the calls of each answer, and the last message."""
    messages, turns = [QUESTION], []
    while True:
        message = ask(model=MODEL, messages=messages, tools=TOOLS, **options)
        if not message.tool_calls:
            return turns, message
        turns.append([[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls])
        messages += [message, *map(result, message.tool_calls)]
        if "tool_choice" in options:
            return turns, message


def create(**body):
    return client.chat.completions.create(**body).choices[0].message


def parse(**body):
    return client.chat.completions.parse(**body).choices[0].message


pieces = []


def stream(**body):
    pieces.clear()
    with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as events:
        for event in events:
            if event.type == "content.delta":
                pieces.append(event.delta)
        assert events.get_final_completion().usage.total_tokens > 0
        return events.get_final_completion().choices[0].message


def error(**body) -> str:
    try:
        client.chat.completions.create(**{"model": MODEL, "messages": [QUESTION]} | body)
    except openai.APIStatusError as error:
        return f"{type(error).__name__} {error.status_code} {error.code}"
    return "no error"


parallel, message = loop(create)
assert message.content, message
streamed, message = loop(stream)
facts = {
    "parallel": parallel,
    "one_by_one": loop(create, parallel_tool_calls=False)[0],
    "forced": loop(create, tool_choice={"type": "function", "function": {"name": "get_time"}})[0],
    "answer": loop(parse, response_format=Answer)[1].parsed.model_dump(),
    "stream": streamed,
    "stream_text": "".join(pieces),
    "stream_in_pieces": len(pieces) > 1,
    "errors": {
        "model": error(model="unknown"),
        "length": error(messages=[{"role": "user", "content": "word " * 9000}]),
    },
}
assert message.content == facts["stream_text"]
print(json.dumps(facts))
