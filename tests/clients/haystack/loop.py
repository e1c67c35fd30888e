"""Haystack: `Agent` on `OpenAIChatGenerator`, a response format, streams, errors."""

import json
import os
from typing import Annotated, Literal

import openai
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret
from pydantic import BaseModel

QUESTION = ChatMessage.from_user("What is the weather in Oslo, and what time is it?")
NAMED = {"type": "function", "function": {"name": "get_time"}}


@tool
def get_weather(city: Annotated[Literal["Oslo"], "City"]) -> str:
    """Weather of a city."""
    return "clear"


@tool
def get_time(zone: Annotated[Literal["UTC"], "Zone"]) -> str:
    """Time of a zone."""
    return "12:00"


class Answer(BaseModel):
    city: Literal["Oslo"]
    sky: Literal["clear"]


def generator(name: str = os.environ["MODEL"], **options) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        api_key=Secret.from_env_var("API_KEY"),
        model=name,
        api_base_url=f"{os.environ['BASE_URL']}/v1",
        generation_kwargs=options,
        max_retries=0,
    )


def calls(messages: list[ChatMessage]) -> list:
    """Return the calls of each answer that has any."""
    return [
        [[call.tool_name, call.arguments] for call in message.tool_calls] for message in messages if message.tool_calls
    ]


def loop(callback=None, **options) -> tuple[list, str]:
    agent = Agent(chat_generator=generator(**options), tools=[get_weather, get_time], streaming_callback=callback)
    messages = agent.run(messages=[QUESTION])["messages"]
    return calls(messages), messages[-1].text


def error(generator: OpenAIChatGenerator, text: str = "Hello") -> str:
    try:
        generator.run([ChatMessage.from_user(text)])
    except openai.APIStatusError as error:
        return f"{type(error).__name__} {error.status_code} {error.code}"
    return "no error"


pieces = []
streamed, text = loop(
    lambda chunk: pieces.append(chunk.content) if chunk.content and not chunk.tool_call_result else None
)
assert "".join(pieces) == text, (pieces, text)
facts = {
    "parallel": loop()[0],
    "one_by_one": loop(parallel_tool_calls=False)[0],
    "forced": calls(generator(tool_choice=NAMED).run([QUESTION], tools=[get_weather, get_time])["replies"]),
    "answer": json.loads(generator(response_format=Answer).run([QUESTION])["replies"][0].text),
    "stream": streamed,
    "stream_text": text,
    "stream_in_pieces": len(pieces) > 1,
    "errors": {"model": error(generator("unknown")), "length": error(generator(), "word " * 9000)},
}
print(json.dumps(facts))
