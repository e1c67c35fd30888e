"""LlamaIndex: `FunctionAgent` on `OpenAILike`, structured prediction, streams, errors."""

import asyncio
import json
import os
from typing import Literal

import openai
from llama_index.core.agent.workflow import AgentOutput, AgentStream, FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

QUESTION = "What is the weather in Oslo, and what time is it?"


def model(name: str = os.environ["MODEL"]) -> OpenAILike:
    return OpenAILike(
        model=name,
        api_base=f"{os.environ['BASE_URL']}/v1",
        api_key=os.environ["API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=4096,
        max_retries=0,
    )


def get_weather(city: Literal["Oslo"]) -> str:
    """Weather of a city."""
    return "clear"


def get_time(zone: Literal["UTC"]) -> str:
    """Time of a zone."""
    return "12:00"


class Answer(BaseModel):
    """Answer to the question."""

    city: Literal["Oslo"]
    sky: Literal["clear"]


async def loop(**options) -> tuple[list, list]:
    """Run an agent; return the calls of each answer that has any, and the pieces of its last answer."""
    agent = FunctionAgent(tools=[get_weather, get_time], llm=model(), **options)
    handler = agent.run(QUESTION)
    turns, pieces = [], []
    async for event in handler.stream_events():
        if isinstance(event, AgentStream):
            pieces += [event.delta] if event.delta else []
        elif isinstance(event, AgentOutput) and event.tool_calls:
            turns.append([[call.tool_name, call.tool_kwargs] for call in event.tool_calls])
            pieces.clear()
    answer = str(await handler)
    assert not pieces or answer == "".join(pieces), (answer, pieces)
    return turns, pieces


def error(llm: OpenAILike, text: str = QUESTION) -> str:
    try:
        llm.chat([ChatMessage(role="user", content=text)])
    except openai.APIStatusError as error:
        return f"{type(error).__name__} {error.status_code} {error.code}"
    return "no error"


turns, pieces = asyncio.run(loop())
whole, _ = asyncio.run(loop(streaming=False))
one_by_one, _ = asyncio.run(loop(allow_parallel_tool_calls=False))
facts = {
    "parallel": whole,
    "one_by_one": one_by_one,
    "answer": model().structured_predict(Answer, PromptTemplate(QUESTION)).model_dump(),
    "stream": turns,
    "stream_text": "".join(pieces),
    "stream_in_pieces": len(pieces) > 1,
    "errors": {"model": error(model("unknown")), "length": error(model(), "word " * 9000)},
}
print(json.dumps(facts))
