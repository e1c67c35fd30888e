"""smolagents: `ToolCallingAgent` on `OpenAIModel`, whole and streamed, a response format, errors."""

import json
import os
from typing import Literal

import openai
from pydantic import BaseModel
from smolagents import ChatMessage, LogLevel, OpenAIModel, Tool, ToolCallingAgent

QUESTION = "What is the weather in Oslo, and what time is it?"
TEXT = "Oslo is clear at noon."


def tool(title: str, argument: str, value: str, result: str) -> Tool:
    """Return a tool with one possible call."""
    arguments = {argument: {"type": "string", "description": argument, "enum": [value]}}

    class One(Tool):
        name = title
        description = title
        inputs = arguments
        output_type = "string"
        skip_forward_signature_validation = True

        def forward(self, **_: str) -> str:
            return result

    return One()


TOOLS = [
    tool("get_weather", "city", "Oslo", "clear"),
    tool("get_time", "zone", "UTC", "12:00"),
    tool("final_answer", "answer", TEXT, TEXT),  # in place of the one with any text
]


class Answer(BaseModel):
    city: Literal["Oslo"]
    sky: Literal["clear"]


def model(name: str = os.environ["MODEL"], **options) -> OpenAIModel:
    return OpenAIModel(
        name,
        api_base=f"{os.environ['BASE_URL']}/v1",
        api_key=os.environ["API_KEY"],
        client_kwargs={"max_retries": 0},
        **options,
    )


def loop(*, stream: bool, **options) -> tuple[list, str]:
    """Run an agent; return the calls of each answer before its last, and the text."""
    agent = ToolCallingAgent(TOOLS, model(**options), stream_outputs=stream, verbosity_level=LogLevel.OFF)
    agent.prompt_templates["system_prompt"] = "Call tools."  # its own has more tokens than the model takes
    text = agent.run(QUESTION)
    steps = [
        [[call.name, call.arguments] for call in getattr(step, "tool_calls", None) or ()] for step in agent.memory.steps
    ]
    turns = [sorted(calls, reverse=True) for calls in steps if calls]
    assert turns.pop() == [["final_answer", {"answer": TEXT}]], turns
    return turns, text


def ask(text: str, name: str = os.environ["MODEL"], **options) -> str:
    message = ChatMessage(role="user", content=[{"type": "text", "text": text}])
    return model(name).generate([message], **options).content


def error(*arguments: str) -> str:
    try:
        ask(*arguments)
    except openai.APIStatusError as error:
        return f"{type(error).__name__} {error.status_code} {error.code}"
    return "no error"


schema = {"name": "answer", "strict": True, "schema": Answer.model_json_schema() | {"additionalProperties": False}}
streamed, text = loop(stream=True)
facts = {
    "parallel": loop(stream=False)[0],
    "one_by_one": loop(stream=False, parallel_tool_calls=False)[0],
    "answer": json.loads(ask(QUESTION, response_format={"type": "json_schema", "json_schema": schema})),
    "stream": streamed,
    "stream_text": text,
    "errors": {"model": error("Hello", "unknown"), "length": error("word " * 9000)},
}
print()  # what the agent streams to the terminal has no end of line
print(json.dumps(facts))
