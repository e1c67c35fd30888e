"""instructor: answers as models by tools, parallel tools and JSON schema, partial streams, errors."""

import json
import os
from collections.abc import Iterable
from typing import Literal

import instructor
import openai
from instructor.core import InstructorRetryException
from pydantic import BaseModel

CLIENT = openai.OpenAI(base_url=f"{os.environ['BASE_URL']}/v1", api_key=os.environ["API_KEY"], max_retries=0)
QUESTION = {"role": "user", "content": "What is the weather in Oslo, and what time is it?"}


class GetWeather(BaseModel):
    """Weather of a city."""

    city: Literal["Oslo"]


class GetTime(BaseModel):
    """Time of a zone."""

    zone: Literal["UTC"]


class Answer(BaseModel):
    """Answer to the question."""

    city: Literal["Oslo"]
    sky: Literal["clear"]


def ask(mode: instructor.Mode, **options):
    client = instructor.from_openai(CLIENT, mode=mode)
    return client.create(**{"model": os.environ["MODEL"], "messages": [QUESTION], "max_retries": 0} | options)


def error(**options) -> str:
    try:
        ask(instructor.Mode.TOOLS, response_model=Answer, **options)
    except InstructorRetryException as error:
        cause = error.__cause__
        while cause is not None and not isinstance(cause, openai.APIStatusError):
            cause = cause.__cause__
        return f"{type(cause).__name__} {cause.status_code} {cause.code}"
    return "no error"


calls = ask(instructor.Mode.PARALLEL_TOOLS, response_model=Iterable[GetWeather | GetTime])
client = instructor.from_openai(CLIENT, mode=instructor.Mode.TOOLS)
partial = [
    each.model_dump()
    for each in client.create_partial(model=os.environ["MODEL"], messages=[QUESTION], response_model=Answer)
]
facts = {
    "parallel": [[[type(call).__name__, call.model_dump()] for call in calls]],
    "answer": ask(instructor.Mode.TOOLS, response_model=Answer).model_dump(),
    "answer_by_schema": ask(instructor.Mode.JSON_SCHEMA, response_model=Answer).model_dump(),
    "stream": partial[-1],
    "stream_in_pieces": len(partial) > 1,
    "errors": {
        "model": error(model="unknown"),
        "length": error(messages=[{"role": "user", "content": "word " * 9000}]),
    },
}
print(json.dumps(facts))
