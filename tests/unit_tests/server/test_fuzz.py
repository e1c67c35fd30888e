"""Random requests, allowed or not by the OpenAPI description: never a 500, and the server goes on."""

from __future__ import annotations

import json

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

from megatron_ext.config import SourceConfig
from megatron_ext.models.update.disk import WeightsRoot
from megatron_ext.server.app import ADMIN_ROUTERS, ROUTERS
from megatron_ext.server.http.auth import open_paths
from megatron_ext.server.http.description import install_description
from megatron_ext.server.weight_updater import WeightsUpdater
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
    return serve(embedded_engine(), "embedded")


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
@settings(max_examples=15, **COMMON)
@given(data=st.data())
def test_described_requests(target, operation, mode, data):
    """SE-6: bodies and parameters made from the description, those that it allows and others; answers conform to it."""
    case = data.draw(operation.as_strategy(generation_mode=mode))
    case.call_and_validate(base_url=target.url, checks=CONFORMS, timeout=60)


@pytest.fixture(scope="module")
def governed(serve, tmp_path_factory) -> LiveServer:
    """Server with routes of administrators, and a folder without a checkpoint."""
    server = serve(tiny_engine(), api_key=KEY, enable_admin_routes=True)
    root = WeightsRoot.of(str(tmp_path_factory.mktemp("weights")))
    server.serving.updater = WeightsUpdater(root, None, SourceConfig(), {})
    return server


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("operation", ADMIN_OPERATIONS, ids=lambda operation: operation.label)
@settings(max_examples=10, **COMMON)
@given(data=st.data())
def test_described_requests_of_administrators(governed, operation, mode, data):
    """SE-5, SE-6: requests of administrators work both suspended and awake."""
    case = data.draw(operation.as_strategy(generation_mode=mode))
    headers = {"Authorization": f"Bearer {KEY}"}
    case.call_and_validate(base_url=governed.url, checks=CONFORMS, timeout=60, headers=headers)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("<1><2>"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type"]), inner),
    max_leaves=4,
)
FORMS = [
    {"type": "text"},
    {"type": "json_object"},
    {"type": "regex", "regex": "[0-9]{2}"},
    {"type": "regex", "regex": "("},
    {"type": "json_schema", "json_schema": {"schema": {"enum": [1, "a"]}}},
    {"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
]
FIELDS = {
    "n": st.integers(-1, 4),
    "stop": st.just("<") | st.lists(st.just(">"), max_size=3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {"include_usage": st.booleans()}, optional={"continuous_usage_stats": st.booleans()}
    ),
    "max_tokens": st.integers(0, 60),
    "min_tokens": st.integers(-1, 20),
    "temperature": st.floats(0, 3) | st.just(1e-300) | st.just(1e300),
    "top_p": st.floats(0, 1) | st.just(5e-324),
    "top_k": st.integers(-2, 200) | st.just(10**30),
    "seed": st.integers() | st.just(10**300),
    "ignore_eos": st.booleans(),
    "echo": st.booleans(),
    "logprobs": st.integers(-1, 21) | st.booleans(),
    "top_logprobs": st.integers(0, 20),
    "cache_salt": st.text(max_size=5),
    "prompt_cache_key": st.text(max_size=5),
    "cache_hints": st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=3),
}
SHAPING = {
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2.5, 2.5),
    "repetition_penalty": st.floats(0, 3) | st.just(1e-300) | st.just(1e300),
    "logit_bias": st.dictionaries(st.sampled_from(["0", "7", "96", "97", "-1", "x"]), st.floats(-101, 101)),
    "bad_words": st.lists(st.sampled_from(["<7>", "<3><4>", "x", ""]), max_size=3),
    "stop_token_ids": st.lists(st.integers(-1, 100), max_size=3),
    "response_format": st.sampled_from(FORMS),
    "structured_outputs": st.sampled_from([{"regex": "[a-c]+"}, {"json": {"type": "null"}}, {"json": True}, {}]),
    "return_token_ids": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "best_of": st.integers(0, 4),
}
TEMPLATES = {
    "tools": st.just([]) | st.just([{"type": "function", "function": {"name": "f", "description": "<|end|>"}}]),
    "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function"}]),
    "parallel_tool_calls": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["x", "messages", "<|end|>"]), VALUES, max_size=2),
}
PROMPTS = st.lists(st.integers(0, 98), max_size=50) | st.just("<5><6>") | st.just(["<5>", "<7><8>"])


def bodies(required: dict):
    """Mostly sound fields, some of which are spoilt."""
    optional = {name: values for name, values in FIELDS.items() if name not in required}
    sound = st.fixed_dictionaries(required, optional=optional)
    names = st.sampled_from([*required, *FIELDS, "model", "tools", "logit_bias", "what"])
    return st.builds(lambda body, spoilt: body | spoilt, sound, st.dictionaries(names, VALUES, max_size=1))


def post(server: LiveServer, path: str, body: dict) -> None:
    content = json.dumps(body).encode()  # with NaN, and halves of characters
    response = server.http.post(path, content=content, headers=HEADERS)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif body.get("stream"):
        assert response.text.endswith("data: [DONE]\n\n"), response.text
    else:
        usage = response.json()["usage"]
        assert isinstance(usage["prompt_tokens_details"]["cached_tokens"], int)


@settings(max_examples=150, **COMMON)
@given(body=bodies({"prompt": PROMPTS}))
def test_completions(target, body):
    post(target, "/v1/completions", body)


def few(required: dict, fields: dict):
    """Select some of the fields, so that not each body has a refused one; one may be spoilt."""
    names = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True)
    sound = names.flatmap(lambda chosen: st.fixed_dictionaries(required | {name: fields[name] for name in chosen}))
    spoilt = st.dictionaries(st.sampled_from(sorted(fields)), VALUES, max_size=1)
    return st.builds(lambda body, others, stream: body | others | {"stream": stream}, sound, spoilt, st.booleans())


@settings(max_examples=80, **COMMON)
@given(body=few({"prompt": PROMPTS, "max_tokens": st.integers(1, 9)}, SHAPING))
def test_completions_that_shape_logits(talking, body):
    post(talking, "/v1/completions", body)


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", ""]), "content": st.text(max_size=12) | VALUES}
    ),
    max_size=3,
)


@settings(max_examples=60, **COMMON)
@given(body=bodies({"messages": MESSAGES, "max_tokens": st.integers(1, 6)}))
def test_chat(talking, body):
    post(talking, "/v1/chat/completions", body)


@settings(max_examples=80, **COMMON)
@given(body=few({"messages": MESSAGES, "max_tokens": st.integers(1, 6)}, SHAPING | TEMPLATES))
def test_chat_with_tools_and_forms(talking, body):
    post(talking, "/v1/chat/completions", body)


@settings(max_examples=100, **COMMON)
@given(content=st.binary(max_size=60) | st.text(alphabet='{}[]":,0123456789eE+-.tfn\\u', max_size=60).map(str.encode))
def test_bytes(target, content):
    response = target.http.post("/v1/completions", content=content, headers=HEADERS)
    assert response.status_code == 400


def test_afterwards_nothing_is_left(target, talking):
    for server in (target, talking):
        server.check_idle()
        assert server.metric("step_failures_total") == 0
    assert target.client().completions.create(model="tiny", prompt=[1], max_tokens=3).usage.completion_tokens == 3
