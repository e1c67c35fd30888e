"""SE-2: every text, list and mapping that a client gives has a bound before any work that grows with it."""

from __future__ import annotations

import sys
import types
import typing
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Union

import annotated_types
import pytest
from fastapi._compat import ModelField
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from megatron_ext.server.app import ADMIN_ROUTERS, ROUTERS
from megatron_ext.server.monitoring.request_trace import MAX_REQUESTS, RequestTrace
from megatron_ext.server.openai.request_fields import LONGEST_CLIENT_NAME, Body, BoundedBy
from tests.unit_tests.server.test_errors import CHAT, COMPLETIONS, MESSAGES, RESPONSES

ROUTES = [route for router in (*ROUTERS, *ADMIN_ROUTERS) for route in router.routes if isinstance(route, APIRoute)]
SIMPLE = (bool, int, float, types.NoneType)  # of bounded size: numbers have 4,300 digits at most


def unbounded(annotation: object, metadata: Sequence[object], place: str) -> Iterator[str]:
    """Yield the places of texts, lists and mappings without a bound."""
    known = [one for item in metadata for one in (item.metadata if isinstance(item, FieldInfo) else [item])]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    has_length = any(isinstance(one, annotated_types.MaxLen) for one in known)
    if any(isinstance(one, BoundedBy) for one in known) or origin is Literal or annotation in SIMPLE:
        return
    if origin is Annotated:
        yield from unbounded(inner[0], [*known, *inner[1:]], place)
    elif origin in (Union, types.UnionType):
        for one in inner:
            yield from unbounded(one, known, place)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from unbounded_fields(annotation, place)
    elif annotation is str or origin in (list, dict, tuple, set, Sequence, Mapping):
        if not has_length:
            yield place
        for number, one in enumerate(inner):
            yield from unbounded(one, [], f"{place}[{number}]")
    else:
        yield f"{place}, a {annotation}"


def unbounded_fields(model: type[BaseModel], place: str) -> Iterator[str]:
    if model.model_config.get("extra") == "allow" and not issubclass(model, Body):
        yield f"{place}, of any fields"  # `Body` counts them
    for name, field in model.model_fields.items():
        yield from unbounded(field.annotation, field.metadata, f"{model.__name__}.{name}")


def given(part: Dependant) -> Iterator[ModelField]:
    """Yield all parameters of a route: its own, and those of its dependencies."""
    for kind in ("body", "query", "header", "path", "cookie"):
        yield from getattr(part, f"{kind}_params")
    for inner in part.dependencies:
        yield from given(inner)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{sorted(route.methods)[0]} {route.path}")
def test_all_that_a_client_gives_has_a_bound(route):
    found = [
        place
        for one in given(route.dependant)
        for place in unbounded(one.field_info.annotation, one.field_info.metadata, f"{route.path} {one.name}")
    ]
    assert found == []


def test_what_has_none_is_found():
    class Part(BaseModel):
        texts: Annotated[list[str], Field(max_length=3)]
        short: Annotated[str, Field(max_length=3)] | None
        mapping: dict[Annotated[str, Field(max_length=3)], int]
        anything: object
        fine: Annotated[Any, BoundedBy("a check")]

    class Whole(BaseModel, extra="allow"):
        parts: Annotated[list[Part], Field(max_length=3)]

    assert list(unbounded(Whole, [], "body")) == [
        "body, of any fields",
        "Part.texts[0]",
        "Part.mapping",
        "Part.anything, a <class 'object'>",
    ]


HELLO = {"messages": [{"role": "user", "content": "<1>"}], "max_tokens": 1}
ASKED = {"input": "a"}
LONG = "a" * (LONGEST_CLIENT_NAME + 1)


@pytest.mark.parametrize(
    ("path", "fields", "param", "named"),
    [
        *((path, {"cache_salt": LONG}, "cache_salt", "512") for path in (COMPLETIONS, CHAT, RESPONSES)),
        (MESSAGES, {"cache_salt": LONG}, None, "512"),
        (RESPONSES, {"user": LONG}, "user", "512"),
        (RESPONSES, {"metadata": {str(i): "a" for i in range(17)}}, "metadata", "at most 16 items"),
        (RESPONSES, {"metadata": {str(i): 1 for i in range(17)}}, "metadata", "at most 16 items"),
        (RESPONSES, {"metadata": {"a" * 65: "a"}}, "metadata", "at most 64 characters"),
        (RESPONSES, {"metadata": {"a": "b" * 513}}, "metadata", "at most 512 characters"),
        (RESPONSES, {"metadata": {"a": 1}}, "metadata", "valid string"),
        (CHAT, {"model": ""}, "model", "at least 1 character"),
        (COMPLETIONS, {"model": "a" * 4097}, "model", "4096"),
        (CHAT, {"chat_template_kwargs": {"a" * 65: 1}}, None, "at most 64 characters"),
        (CHAT, {"chat_template_kwargs": {"a-b": 1}}, None, "'a-b' is not the name of a variable"),
        (CHAT, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [1] * 129}}}, "tool_choice", "128"),
    ],
    ids=str,
)
def test_refused_by_name(embedded, path, fields, param, named):
    body = {COMPLETIONS: {"prompt": "a"}, RESPONSES: ASKED}.get(path, HELLO) | fields
    error = embedded.http.post(path, json=body)
    assert error.status_code == 400
    assert named in error.json()["error"]["message"]
    assert error.json()["error"].get("param") == param


def test_the_trace_keeps_digests_of_salts():
    """10,000 requests with the longest salts, and 4 million tokens, take 24 MB at most (SECURITY.md)."""
    trace = RequestTrace()
    for i in range(MAX_REQUESTS):
        record = SimpleNamespace(arrival_wall_time=float(i), prompt_tokens=(1,) * 400, generated_tokens=(2,) * 19)
        trace.note(record, f"{i:0{LONGEST_CLIENT_NAME}}")
    assert len(trace) == MAX_REQUESTS
    assert size_of(trace) < 24 * 2**20


def size_of(value: object) -> int:
    """Return the bytes of an object and of everything that it refers to, shared objects counted each time."""
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(map(size_of, value.values()))
    if isinstance(value, list | tuple | deque):
        return size + sum(map(size_of, value))
    return size + (size_of(vars(value)) if hasattr(value, "__dict__") else 0)
