"""The library of `llm`: a model of `extra-openai-models.yaml` with tools, a schema, streams, errors."""

import json
import os
import tempfile
from pathlib import Path
from typing import Literal

FOLDER = Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(FOLDER)
MODEL = """
- model_id: {name}
  model_name: {name}
  api_base: {url}/v1
  api_key_name: server
  supports_tools: true
  supports_schema: true
"""
models = [MODEL.format(name=name, url=os.environ["BASE_URL"]) for name in (os.environ["MODEL"], "unknown")]
(FOLDER / "extra-openai-models.yaml").write_text("".join(models))
(FOLDER / "keys.json").write_text(json.dumps({"server": os.environ["API_KEY"]}))

import llm  # noqa: E402 - it reads the folder's name
import openai  # noqa: E402
from pydantic import BaseModel  # noqa: E402

QUESTION = "What is the weather in Oslo, and what time is it?"
model = llm.get_model(os.environ["MODEL"])


def get_weather(city: Literal["Oslo"]) -> str:
    """Weather of a city."""
    return "clear"


def get_time(zone: Literal["UTC"]) -> str:
    """Time of a zone."""
    return "12:00"


class Answer(BaseModel, extra="forbid"):
    city: Literal["Oslo"]
    sky: Literal["clear"]


def loop(*, stream: bool) -> tuple[list, list]:
    """Run a chain; return the calls of each answer that has any, and the pieces of the last one."""
    turns, pieces = [], []
    for response in model.chain(QUESTION, tools=[get_weather, get_time], stream=stream).responses():
        pieces = list(filter(None, response))
        calls = [[call.name, call.arguments] for call in response.tool_calls()]
        turns += [calls] if calls else []
    return turns, pieces


def error(name: str, text: str) -> str:
    try:
        llm.get_model(name).prompt(text, stream=False).text()
    except openai.APIStatusError as error:
        return f"{type(error).__name__} {error.status_code} {error.code}"
    return "no error"


streamed, pieces = loop(stream=True)
facts = {
    "parallel": loop(stream=False)[0],
    "answer": json.loads(model.prompt(QUESTION, schema=Answer, stream=False).text()),
    "stream": streamed,
    "stream_text": "".join(pieces),
    "stream_in_pieces": len(pieces) > 1,
    "errors": {"model": error("unknown", "Hello"), "length": error(os.environ["MODEL"], "word " * 9000)},
}
print(json.dumps(facts))
