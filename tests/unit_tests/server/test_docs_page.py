"""The description of the API, and the page made of it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from megatron_ext.server.http.docs_page import docs_page
from tests.unit_tests.support.server import LiveServer, embedded_engine, tiny_engine


@pytest.fixture(scope="module")
def described(serve) -> LiveServer:
    """Server with all routes, those of administrators included."""
    return serve(tiny_engine(), api_key="key", enable_admin_routes=True)


@pytest.fixture(scope="module")
def talking(serve) -> LiveServer:
    return serve(embedded_engine(explain_prefix_cache=True), "model")


@pytest.fixture(scope="module")
def schema(described) -> dict:
    return described.http.get("/openapi.json").json()


@pytest.fixture(scope="module")
def page(described) -> str:
    return described.http.get("/docs").text


class _Ids(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            elif name == "href" and value.startswith("#"):
                self.targets.append(value[1:])


def fields(schema: dict):
    """Yield the schema, the name and the description of each field and parameter."""
    for name, component in schema["components"]["schemas"].items():
        for field, part in component.get("properties", {}).items() if not name.endswith("Error") else ():
            yield name, field, part, field in component.get("required", ())
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            for one in operation.get("parameters", ()):
                yield path, one["name"], one["schema"], one["required"]


def test_each_field_has_a_description_an_example_and_a_default(schema, page):
    found = list(fields(schema))
    assert len(found) > 100
    for where, name, part, is_required in found:
        assert part.get("description"), f"{where}.{name}: a line in server/http/field_descriptions.py is missing"
        assert len(part["examples"]) == 1, (where, name)
        assert ("default" in part) is not is_required, (where, name)
        is_shown = where.startswith("/") or f'id="{where.lower()}"' in page
        assert not is_shown or f"<code>{name}</code>" in page, (where, name)  # some objects are in no body as such


# Features that the model or the server lacks: a template with tools, thinking, speculation; contradictions.
LACKING = {"tools", "tool_choice", "parallel_tool_calls", "num_speculative_tokens", "thinking_budget_tokens"}
LACKING |= {"cache_checkpoint"}  # of a longer prompt


@pytest.mark.parametrize(
    ("path", "name", "given"),
    [
        ("/v1/completions", "CompletionRequest", {"prompt": "def", "max_tokens": 9}),
        ("/v1/chat/completions", "ChatRequest", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
        ("/tokenize", "TokenizeRequest", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/detokenize", "DetokenizeRequest", {"tokens": [1]}),
    ],
)
def test_examples_are_accepted(talking, schema, path, name, given):
    """Each field's example with a valid body, apart from features that the served model lacks."""
    for field, part in schema["components"]["schemas"][name]["properties"].items():
        if field in LACKING:
            continue
        body = dict(given)
        if path == "/tokenize" and field in ("prompt", "add_special_tokens"):
            body = {"prompt": "def"}
        elif field == "max_completion_tokens":
            del body["max_tokens"]
        body |= {"stream": True} if field == "stream_options" else {}
        body |= {"logprobs": True} if field == "top_logprobs" else {}
        body |= {"add_generation_prompt": False} if field == "continue_final_message" else {}
        answer = talking.http.post(path, json=body | {field: part["examples"][0]})
        assert answer.status_code == 200, (field, answer.text)


def test_bounds_of_integers_are_integers(schema, page):
    tokens = schema["components"]["schemas"]["CompletionRequest"]["properties"]["max_tokens"]["anyOf"][0]
    assert (tokens["minimum"], type(tokens["minimum"])) == (0, int)
    assert "integer, at least 0<" in page
    assert not re.search(r"integer, at (?:least|most) -?\d+\.", page)


def test_names_in_texts_are_code(page):
    assert "has the seed <code>seed</code> + i" in page
    assert "`" not in page


def test_contents_lead_to_each_route_and_object(schema, page):
    found = _Ids(page)
    assert len(found.ids) == len(set(found.ids))
    assert found.targets == found.ids
    assert len(found.ids) > len(schema["paths"])
    assert {"post-v1-chat-completions", "message", "tool", "streamoptions", "get-metrics-history"} <= set(found.ids)


def test_fits_a_small_screen(page):
    assert "<meta name=viewport" in page


def test_markup_in_descriptions_stays_text():
    part = {"type": "string", "description": "<b>1</b>", "examples": ["<i>"], "default": "<u>"}
    schema = {
        "info": {"title": "<t>", "version": "1"},
        "paths": {
            "/<p>": {
                "get": {
                    "description": "<d>",
                    "parameters": [{"name": "<n>", "schema": part, "required": False}],
                    "responses": {"200": {"description": "<r>"}},
                }
            }
        },
        "components": {"schemas": {}},
    }
    page = docs_page(schema)
    for word in ("<b>", "<i>", "<u>", "<t>", "<p>:", "<d>", "<n>", "<r>"):
        assert word not in page.replace("<p>&lt;d&gt;", "")
