"""LangChain: `create_agent` on `ChatOpenAI`; argument: "chat" or "responses"."""

import json
import os
import sys
from typing import Literal

import openai
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = {"messages": [{"role": "user", "content": "What is the weather in Oslo, and what time is it?"}]}


def model(**options) -> ChatOpenAI:
    options = {
        "model": os.environ["MODEL"],
        "max_retries": 0,
        "use_responses_api": sys.argv[1] == "responses",
    } | options
    return ChatOpenAI(base_url=f"{os.environ['BASE_URL']}/v1", api_key=os.environ["API_KEY"], **options)


@tool
def get_weather(city: Literal["Oslo"]) -> dict:
    """Weather of a city."""
    return {"sky": "clear"}


@tool
def get_time(zone: Literal["UTC"]) -> dict:
    """Time of a zone."""
    return {"time": "12:00"}


class Answer(BaseModel):
    """Answer to the question."""

    city: Literal["Oslo"]
    sky: Literal["clear"]


TOOLS = [get_weather, get_time]


def turns(messages) -> list:
    """Return the calls of each answer that has any."""
    calling = [message for message in messages if isinstance(message, AIMessage) and message.tool_calls]
    return [[[call["name"], call["args"]] for call in message.tool_calls] for message in calling]


def loop(agent) -> list:
    return turns(agent.invoke(QUESTION)["messages"])


def error(chat: ChatOpenAI, text: str = "Hello") -> str:
    try:
        chat.invoke(text)
    except openai.APIStatusError as error:
        return f"{type(error).__name__} {error.status_code} {error.code}"
    return "no error"


one_by_one = model(model_kwargs={"parallel_tool_calls": False})
structured = create_agent(model(), TOOLS, response_format=ProviderStrategy(Answer)).invoke(QUESTION)

pieces, messages = [], []
for kind, part in create_agent(model(), TOOLS).stream(QUESTION, stream_mode=["messages", "values"]):
    if kind == "values":
        messages = part["messages"]
    elif isinstance(part[0], AIMessageChunk) and part[0].text:
        pieces.append(part[0].text)

forced = model().bind_tools(TOOLS, tool_choice="get_time").invoke("What time is it?")
facts = {
    "parallel": loop(create_agent(model(), TOOLS)),
    "one_by_one": loop(create_agent(one_by_one, TOOLS)),
    "forced": turns([forced]),
    "answer": structured["structured_response"].model_dump(),
    "stream": turns(messages),
    "stream_text": "".join(pieces),
    "stream_in_pieces": len(pieces) > 1,
    "errors": {"model": error(model(model="unknown")), "length": error(model(), "word " * 9000)},
}
print(json.dumps(facts))
