"""Responses with `openai` for Python: function calling, parsed answers, streams, a store, errors."""

import json
import os
from typing import Literal

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{os.environ['BASE_URL']}/v1", api_key=os.environ["API_KEY"], max_retries=0)
MODEL, HAS_STORE = os.environ["MODEL"], bool(os.environ["HAS_STORE"])
QUESTION = {"role": "user", "content": "What is the weather in Oslo, and what time is it?"}


class Answer(BaseModel):
    city: Literal["Oslo"]
    sky: Literal["clear"]


def tool(name: str, **properties) -> dict:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    parameters["additionalProperties"] = False
    return {"type": "function", "name": name, "strict": True, "parameters": parameters}


TOOLS = [
    tool("get_weather", city={"type": "string", "enum": ["Oslo"]}),
    tool("get_time", zone={"type": "string", "enum": ["UTC"]}),
]


def result(call) -> dict:
    return {"type": "function_call_output", "call_id": call.call_id, "output": '{"sky": "clear", "time": "12:00"}'}


def loop(ask, **options) -> tuple[list, object]:
    """Ask until an answer has no calls; return the calls of each answer, and the last answer.

    With a store each request has the new items only, otherwise the whole conversation.
    """
    items, turns, kept = [QUESTION], [], {}
    while True:
        response = ask(model=MODEL, instructions="Be brief.", input=items, tools=TOOLS, **kept, **options)
        assert response.status == "completed", response
        calls = [item for item in response.output if item.type == "function_call"]
        turns += [[[call.name, json.loads(call.arguments)] for call in calls]] if calls else []
        if not calls or "tool_choice" in options:
            return turns, response
        if HAS_STORE:
            items, kept = [result(call) for call in calls], {"previous_response_id": response.id}
        else:
            items = [*items, *response.output, *map(result, calls)]


pieces, kinds = [], []


def stream(**body):
    pieces.clear()
    with client.responses.stream(**body) as events:
        for number, event in enumerate(events):
            assert event.sequence_number == number, event
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                pieces.append(event.delta)
        return events.get_final_response()


def error(**body) -> str:
    try:
        client.responses.create(**{"model": MODEL, "input": [QUESTION]} | body)
    except openai.APIStatusError as error:
        return f"{type(error).__name__} {error.status_code} {error.code}"
    return "no error"


parallel, response = loop(client.responses.create)
assert response.usage.input_tokens_details.cached_tokens >= 0, response.usage
assert response.store is HAS_STORE, response.store
if HAS_STORE:
    assert client.responses.retrieve(response.id).output_text == response.output_text
    client.responses.delete(response.id)
    try:
        client.responses.retrieve(response.id)
        raise AssertionError("a deleted response was found")
    except openai.NotFoundError:
        pass
streamed, last = loop(stream)
assert kinds[:2] == ["response.created", "response.in_progress"], kinds
assert kinds[-1] == "response.completed", kinds
assert last.output_text == response.output_text == "".join(pieces), pieces
facts = {
    "parallel": parallel,
    "one_by_one": loop(client.responses.create, parallel_tool_calls=False)[0],
    "forced": loop(client.responses.create, tool_choice={"type": "function", "name": "get_time"})[0],
    "answer": loop(client.responses.parse, text_format=Answer)[1].output_parsed.model_dump(),
    "stream": streamed,
    "stream_text": "".join(pieces),
    "stream_in_pieces": len(pieces) > 1,
    "errors": {"model": error(model="unknown"), "length": error(input="word " * 9000)},
}
print(json.dumps(facts))
