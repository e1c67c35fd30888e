"""OpenAI Agents SDK: `Runner` with tools, typed output, streams, errors; argument: "chat" or "responses"."""

import asyncio
import json
import os
import sys
from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from pydantic import BaseModel

KIND = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[sys.argv[1]]
QUESTION = "What is the weather in Oslo, and what time is it?"
CLIENT = openai.AsyncOpenAI(base_url=f"{os.environ['BASE_URL']}/v1", api_key=os.environ["API_KEY"], max_retries=0)
CONFIG = RunConfig(tracing_disabled=True)


@function_tool
def get_weather(city: Literal["Oslo"]) -> str:
    """Weather of a city."""
    return "clear"


@function_tool
def get_time(zone: Literal["UTC"]) -> str:
    """Time of a zone."""
    return "12:00"


class Answer(BaseModel):
    city: Literal["Oslo"]
    sky: Literal["clear"]


def agent(name: str = os.environ["MODEL"], settings: ModelSettings | None = None, **options) -> Agent:
    settings = settings or ModelSettings()
    model = KIND(model=name, openai_client=CLIENT)
    return Agent("planner", model=model, tools=[get_weather, get_time], model_settings=settings, **options)


def turns(result) -> list:
    """Return the calls of each answer that has any."""
    found = []
    for response in result.raw_responses:
        calls = [item for item in response.output if item.type == "function_call"]
        found += [[[call.name, json.loads(call.arguments)] for call in calls]] if calls else []
    return found


async def loop(**options) -> list:
    return turns(await Runner.run(agent(**options), QUESTION, run_config=CONFIG))


async def error(agent: Agent, text: str = QUESTION) -> str:
    try:
        await Runner.run(agent, text, run_config=CONFIG)
    except openai.APIStatusError as error:
        return f"{type(error).__name__} {error.status_code} {error.code}"
    return "no error"


async def main() -> dict:
    structured = await Runner.run(agent(output_type=Answer), QUESTION, run_config=CONFIG)
    stream = Runner.run_streamed(agent(), QUESTION, run_config=CONFIG)
    pieces = []
    async for event in stream.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            pieces.append(event.data.delta)
    assert stream.final_output == "".join(pieces), stream.final_output
    forced = ModelSettings(tool_choice="get_time")
    return {
        "parallel": await loop(),
        "one_by_one": await loop(settings=ModelSettings(parallel_tool_calls=False)),
        "forced": await loop(settings=forced, tool_use_behavior="stop_on_first_tool"),
        "answer": structured.final_output.model_dump(),
        "stream": turns(stream),
        "stream_text": stream.final_output,
        "stream_in_pieces": len(pieces) > 1,
        "errors": {"model": await error(agent("unknown")), "length": await error(agent(), "word " * 9000)},
    }


print(json.dumps(asyncio.run(main())))
