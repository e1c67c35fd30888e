"""Pydantic AI: agents with tools, native output, streams, errors; argument: "chat" or "responses"."""

import asyncio
import json
import os
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

KIND = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[sys.argv[1]]
PROVIDER = OpenAIProvider(base_url=f"{os.environ['BASE_URL']}/v1", api_key=os.environ["API_KEY"])
QUESTION = "What is the weather in Oslo, and what time is it?"


def get_weather(city: Literal["Oslo"]) -> dict:
    """Weather of a city."""
    return {"sky": "clear"}


def get_time(zone: Literal["UTC"]) -> dict:
    """Time of a zone."""
    return {"time": "12:00"}


class Answer(BaseModel):
    """Answer to the question."""

    city: Literal["Oslo"]
    sky: Literal["clear"]


def agent(name: str = os.environ["MODEL"], **options) -> Agent:
    return Agent(KIND(name, provider=PROVIDER), tools=[get_weather, get_time], **options)


def turns(result) -> list:
    """Return the calls of each answer that has any."""
    answers = [[part for part in message.parts if isinstance(part, ToolCallPart)] for message in result.all_messages()]
    return [[[call.tool_name, call.args_as_dict()] for call in calls] for calls in answers if calls]


def error(agent: Agent, text: str = QUESTION) -> str:
    try:
        agent.run_sync(text)
    except ModelHTTPError as error:
        return f"{type(error).__name__} {error.status_code} {error.body['code']}"
    return "no error"


async def stream() -> tuple:
    async with agent().run_stream(QUESTION) as result:
        return [piece async for piece in result.stream_text(delta=True, debounce_by=None)], turns(result)


pieces, streamed = asyncio.run(stream())
facts = {
    "parallel": turns(agent().run_sync(QUESTION)),
    "one_by_one": turns(agent(model_settings={"parallel_tool_calls": False}).run_sync(QUESTION)),
    "answer": agent(output_type=NativeOutput(Answer)).run_sync(QUESTION).output.model_dump(),
    "stream": streamed,
    "stream_text": "".join(pieces),
    "stream_in_pieces": len(pieces) > 1,
    "errors": {"model": error(agent("unknown")), "length": error(agent(), "word " * 9000)},
}
print(json.dumps(facts))
