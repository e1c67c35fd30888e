"""Random requests, allowed or not by the OpenAPI description: never a 500, and the server goes on."""

from __future__ import annotations

import functools
import json
import random
import time

import hypothesis.strategies as st
import pytest
import schemathesis
from fastapi import APIRouter, FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.generation import GenerationMode

from megatron_ext.config import ServerLimits
from megatron_ext.models.update.disk import WeightsRoot
from megatron_ext.server.app import ADMIN_ROUTERS, ROUTERS
from megatron_ext.server.http.auth import open_paths
from megatron_ext.server.http.description import install_description
from megatron_ext.server.serving import WeightsUpdater
from tests.unit_tests.support.server import LiveServer, embedded_engine, tiny_engine

COMMON = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "derandomize": True,  # a failure here must be one everywhere
    "database": None,
}
HEADERS = {"content-type": "application/json"}
CONFORMS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def target(serve) -> LiveServer:
    """Sequences are short, so that requests that are good by chance do not take long."""
    return serve(tiny_engine(max_sequence_length=48))


@pytest.fixture(scope="module")
def talking(serve) -> LiveServer:
    return serve(embedded_engine(max_sequence_length=512), "embedded", limits=ServerLimits(responses_store_mb=1))


def described(routers: tuple[APIRouter, ...], *, has_keys: bool = False) -> list:
    """The operations of the description that the server gives of itself."""
    app = FastAPI(title="megatron_ext", version="0")
    for router in routers:
        app.include_router(router)
    install_description(app, open_paths=open_paths(hides_counts=False), has_keys=has_keys)
    return [result.ok() for result in schemathesis.openapi.from_dict(app.openapi()).get_all_operations()]


OPERATIONS = described(ROUTERS)
ADMIN_OPERATIONS = described(ADMIN_ROUTERS, has_keys=True)
KEY = "the-only-key"


def test_the_description_is_the_servers(target):
    paths = target.http.get("/openapi.json").json()["paths"]
    assert {(method, path) for path, methods in paths.items() for method in methods} == {
        (operation.method, operation.path) for operation in OPERATIONS
    }
    assert len(OPERATIONS) == 25


@pytest.mark.parametrize(
    ("operation", "mode"),
    [
        pytest.param(operation, mode, id=f"{operation.label} {mode.value}")
        for operation in OPERATIONS
        for mode in GenerationMode
        if operation.body or mode is GenerationMode.POSITIVE  # without a body nothing can be wrong
    ],
)
@pytest.mark.parametrize("count", [2, pytest.param(300, marks=pytest.mark.soak)])
def test_described_requests(target, operation, mode, count):
    """SE-6: bodies and parameters made from the description, those that it allows and others; answers conform to it."""

    @settings(max_examples=count, **COMMON)
    @given(case=operation.as_strategy(generation_mode=mode))
    def conforms(case: schemathesis.Case) -> None:
        case.call_and_validate(base_url=target.url, checks=CONFORMS, timeout=60)

    conforms()


@pytest.fixture(scope="module")
def governed(serve, tmp_path_factory) -> LiveServer:
    """Server with routes of administrators, and a folder without a checkpoint."""
    server = serve(tiny_engine(), api_key=KEY, enable_admin_routes=True)
    root = WeightsRoot.of(str(tmp_path_factory.mktemp("weights")))
    server.serving.updater = WeightsUpdater(root, server.serving.engine)
    return server


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("operation", ADMIN_OPERATIONS, ids=lambda operation: operation.label)
@settings(max_examples=2, **COMMON)
@given(data=st.data())
def test_described_requests_of_administrators(governed, operation, mode, data):
    """SE-5, SE-6: requests of administrators work both suspended and awake."""
    case = data.draw(operation.as_strategy(generation_mode=mode))
    headers = {"Authorization": f"Bearer {KEY}"}
    case.call_and_validate(base_url=governed.url, checks=CONFORMS, timeout=60, headers=headers)


# Hostile bodies: fields that are sound alone, some of which are spoilt, as text that may be spoilt once more

DIGITS, LETTERS = "@digits@", "@letters@"  # of a number and a text that are put into the text of a body
HOSTILE = (
    *(None, True, -1, 0.5, 1e300, 10**300, float("nan"), float("inf"), DIGITS),
    *("", "a", "\0", "\ud83d", "\U0001f600", "<1><2>", "<|end|>", LETTERS, "NaN", "[" * 65 + "]" * 65),
    *([], {}, [None], [""], [[]], [{}], {"": None}, {"\ud83d": 1}, {"a" * 65: 1}, {"type": "text"}, list(range(70))),
    functools.reduce(lambda inner, _: [inner], range(70), 1),
    {"$ref": "#"},
)
ARGUMENTS = ("", "{}", "{", '{"a": NaN}', '"\\ud83d"', "[" * 65 + "]" * 65, '{"a": 1e999}', "1" * 5000, "[]" * 3)
SCHEMAS = (
    {},
    {"enum": [1, "a"]},
    {"not": {}},
    {"$ref": "#"},
    {"type": "object", "properties": {"a": {"type": "null"}}},
)
SAMPLING = {
    "temperature": (0, 1e-300, 2),
    "top_p": (0, 5e-324, 1),
    "top_k": (-1, 0, 10**30),
    "seed": (1, -1, 10**300),
    "stream": (True, False),
    "cache_salt": ("", "a"),
    "enable_prefix_caching": (True, False),
}
SHAPING = SAMPLING | {
    "n": (1, 4),
    "stop": ("<", [">", "a"]),
    "stream_options": ({"include_usage": True}, {"continuous_usage_stats": True}),
    "min_tokens": (0, 2),
    "ignore_eos": (True,),
    "min_p": (0.5,),
    "presence_penalty": (-2,),
    "repetition_penalty": (1e-300, 1.5, 1e300),
    "logit_bias": ({"7": 100, "96": -100}, {"x": 1}),
    "bad_words": (["<7>", "x"],),
    "stop_token_ids": ([1, 97],),
    "response_format": (
        {"type": "json_object"},
        {"type": "regex", "regex": "[0-9]{2}"},
        {"type": "regex", "regex": "("},
        *({"type": "json_schema", "json_schema": {"schema": one}} for one in SCHEMAS),
    ),
    "structured_outputs": ({"regex": "[a-c]+"}, {"json": {"type": "null"}}, {"choice": ["a", "b"]}),
    "metadata": ({"a": "b"},),
    "user": ("a",),
    "cache_checkpoint": ([1, 5],),
    "return_token_ids": (True,),
    "skip_special_tokens": (False,),
    "num_speculative_tokens": (0, 2),
}
MESSAGES = (
    [{"role": "user", "content": "a"}],
    [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}],
    *(
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": one}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ]
        for one in ARGUMENTS
    ),
)
TOOLS = tuple([{"type": "function", "function": {"name": "f", "parameters": one, "strict": True}}] for one in SCHEMAS)
CONTROLS = {"chat_template_kwargs": ({"enable_thinking": True}, {"x": 1}), "reasoning_effort": ("none", "high")}
CHAT = CONTROLS | {
    "tools": TOOLS,
    "tool_choice": ("auto", "none", "required"),
    "parallel_tool_calls": (False,),
    "continue_final_message": (True,),
    "thinking_budget_tokens": (1,),
    "logprobs": (True,),
    "top_logprobs": (2,),
}
ITEMS = (
    "a",
    [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
    *(
        [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": one},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ]
        for one in ARGUMENTS
    ),
)
FLAT_TOOLS = tuple([{"type": "function", "name": "f", "parameters": one}] for one in SCHEMAS)
TURNS = (
    [{"role": "user", "content": "a"}],
    [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]},
    ],
)
PARAMS = {
    "system": ("a", [{"type": "text", "text": "a"}]),
    "tools": tuple([{"name": "f", "input_schema": one}] for one in SCHEMAS),
    "thinking": ({"type": "enabled", "budget_tokens": 1}, {"type": "disabled"}),
    "output_config": tuple({"format": {"type": "json_schema", "schema": one}} for one in SCHEMAS),
    "tool_choice": ({"type": "any"}, {"type": "tool", "name": "f"}),
}
PROMPTS = ("a", ["a", "b"], [1, 2], [[1], [2, 3]])
# By path: required fields and others, each with sound values; None for a server of administrators.
BODIES = {
    "/v1/completions": ({"prompt": PROMPTS, "max_tokens": (1, 3)}, SHAPING | {"echo": (True,), "logprobs": (0, 2)}),
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": (1, 3)}, SHAPING | CHAT),
    "/v1/responses": (
        {"input": ITEMS, "max_output_tokens": (1, 3)},
        SAMPLING
        | {
            "tools": FLAT_TOOLS,
            "text": tuple({"format": {"type": "json_schema", "name": "x", "schema": one}} for one in SCHEMAS),
            "reasoning": ({"effort": "low"},),
            "metadata": ({"a": "b"},),
            "user": ("a",),
        },
    ),
    "/v1/responses/input_tokens": ({"input": ITEMS}, {"tools": FLAT_TOOLS, "instructions": ("a",)}),
    "/v1/messages": ({"messages": TURNS, "max_tokens": (2, 3)}, SAMPLING | PARAMS | {"stop_sequences": (["a"],)}),
    "/v1/messages/count_tokens": ({"messages": TURNS}, PARAMS),
    "/tokenize": ({"messages": MESSAGES}, CONTROLS | {"tools": TOOLS, "return_token_strs": (True,)}),
    "/detokenize": ({"tokens": ([1, 2],)}, {}),
    "/abort": ({"request_id": ("a",)}, {"abort_all": (True,)}),
    "/update_weights_from_disk": ({"model_path": ("a",)}, {"weights_version": (1,), "in_flight": ("finish",)}),
    **dict.fromkeys(
        ("/sleep", "/wake_up", "/pause", "/resume", "/flush_cache", "/start_profile", "/stop_profile"),
        ({}, {"a": (1,)}),
    ),
}


def spoil(source: random.Random, value: object) -> object:
    """Return a value with a hostile one in place of it or of a part of it; a part may also go, or have another name."""
    if isinstance(value, dict | list) and value and source.random() < 0.95:
        copy = value.copy()
        place = source.choice(list(copy)) if isinstance(copy, dict) else source.randrange(len(copy))
        part = copy.pop(place)
        if isinstance(copy, list):
            copy.insert(place, spoil(source, part))
        elif (kind := source.random()) < 0.8:
            copy[place] = spoil(source, part)
        elif kind < 0.9:
            copy[source.choice(("", "a", "\ud83d", "a" * 65))] = part
        return copy
    return source.choice(HOSTILE)


def hostile_body(source: random.Random, path: str) -> bytes:
    required, others = BODIES[path]
    chosen = required | {name: others[name] for name in source.sample(sorted(others), min(len(others), 3))}
    body: object = {name: source.choice(values) for name, values in chosen.items()}
    for _ in range(source.choice((0, 0, 1, 1, 2))):
        body = spoil(source, body)
    text = json.dumps(body, ensure_ascii=source.random() < 0.7)
    text = text.replace(f'"{DIGITS}"', "9" * 5000).replace(LETTERS, "a" * 5000)
    kind = source.random()
    if kind < 0.05:
        return text.encode(source.choice(("utf-16", "utf-16-le", "utf-32-be", "utf-8-sig")), "surrogatepass")
    if kind < 0.1:
        text = text.replace("{", '{"model": 1, "model": null, ', 1)
    content = bytearray(text.encode("utf-8", "surrogatepass"))
    if kind > 0.9 and content:
        start = source.randrange(len(content))
        content[start : start + source.randrange(4)] = source.randbytes(source.randrange(3))
    return bytes(content)


@pytest.mark.parametrize("count", [100, pytest.param(20_000, marks=pytest.mark.soak)])
def test_hostile_bodies(talking, governed, caplog, count):
    """SE-2, SE-6: no 5xx and no traceback, and where many are sent none that takes 2 s of processor time."""
    source = random.Random(53)
    for number in range(count):
        path = source.choice(sorted(BODIES))
        server = talking if path.startswith(("/v1", "/tok", "/detok")) else governed
        content = hostile_body(source, path)
        begun = time.process_time()
        response = server.http.post(path, content=content, headers=HEADERS | {"Authorization": f"Bearer {KEY}"})
        spent = time.process_time() - begun
        shown = f"{number}: {path} {content[:2000]!r}"
        assert response.status_code < 500, f"{shown}: {response.text}"
        assert [record.getMessage() for record in caplog.records if record.exc_info] == [], shown
        assert spent < 2 or count < 20_000, f"{shown}: {spent} s"
        caplog.clear()
        if response.status_code >= 400:
            error = response.json()["error"]
            assert {"message", "type"} <= set(error), shown
        elif response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.endswith(("data: [DONE]\n\n", "}\n\n")), shown


def test_afterwards_nothing_is_left(target, talking, governed):
    for path in ("/wake_up", "/resume"):
        assert governed.http.post(path, headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    for server in (target, talking):
        server.check_idle()
        assert server.metric("step_failures_total") == 0
    assert target.client().completions.create(model="tiny", prompt=[1], max_tokens=3).usage.completion_tokens == 3
