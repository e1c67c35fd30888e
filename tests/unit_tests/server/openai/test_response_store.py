"""SA-12: stored responses: follow-ups by id, bounds, tenants, and the way to the replica that has them."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest

from megatron_ext.ray_serve.forwarded import ForwardedRequest, IngressApp, PromptRequest, ReadPrompt
from megatron_ext.ray_serve.prompts import read_prompt
from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.openai.chat_prompt import AnswerMemory
from megatron_ext.server.openai.responses_api.response_store import (
    LONGEST_AGE,
    ResponseStore,
    new_id,
)
from tests.on_request import long_except
from tests.unit_tests.server.openai.test_responses import BASE, FLAT, QUESTION, RESPONSES, create
from tests.unit_tests.server.test_errors import check_error
from tests.unit_tests.support.server import PATIENT, LiveServer, embedded_engine

STORES = replace(PATIENT, responses_store_mb=1.0)
ALICE, BOB = "alice's key", "bob's key"
NEXT = "And in Rome?"


@pytest.fixture(scope="module")
def storing(serve) -> LiveServer:
    return serve(embedded_engine(is_whole=True), "embedded", limits=STORES)


@pytest.fixture(scope="module")
def locked(serve, tmp_path_factory) -> LiveServer:
    file = tmp_path_factory.mktemp("keys") / "api"
    file.write_text(f"{ALICE}\n{BOB}\n")
    return serve(embedded_engine(), "embedded", limits=STORES, api_key_file=str(file))


class TestFollowUps:
    @pytest.mark.parametrize("stream", long_except([True], [False, True]), ids=["whole", "streamed"])
    def test_equal_the_whole_conversation(self, storing, stream):
        """Tokens are those of a request with all items, and the next turn skips the blocks of the turn before."""
        storing.reset_cache()
        fields = {"max_output_tokens": 24, "return_token_ids": True}
        first = create(storing, input=QUESTION, instructions="Be brief.", stream=stream, **fields)
        assert first["store"] is True
        items = [{"role": "user", "content": QUESTION}, *first["output"], {"role": "user", "content": NEXT}]
        second = create(storing, previous_response_id=first["id"], input=NEXT, instructions="Be brief.", **fields)
        known = first["usage"]["input_tokens"] + first["usage"]["output_tokens"] - 1
        assert second["usage"]["input_tokens_details"]["cached_tokens"] == known // 16 * 16 > 0
        whole = create(storing, input=items, instructions="Be brief.", stream=stream, store=False, **fields)
        assert (second["prompt_token_ids"], second["token_ids"]) == (whole["prompt_token_ids"], whole["token_ids"])
        assert (second["previous_response_id"], whole["store"]) == (first["id"], False)
        third = create(storing, previous_response_id=second["id"], input=NEXT, **fields)
        items += [*second["output"], {"role": "user", "content": NEXT}]
        assert third["prompt_token_ids"] == create(storing, input=items, **fields)["prompt_token_ids"]

    def test_a_conversation_is_as_long_as_a_body_at_most(self, storing, monkeypatch):
        """Each turn may have a whole body, and a follow-up reads all of them."""
        first = create(storing, input=QUESTION, max_output_tokens=1)
        monkeypatch.setattr(storing.serving.response_store, "_max_conversation", 100)
        body = BASE | {"previous_response_id": first["id"], "input": NEXT}
        error = check_error(storing.http.post(RESPONSES, json=body), 400)
        assert "the limit is 100 (--max-body-mb)" in error["message"]
        references = [{"type": "item_reference", "id": first["output"][0]["id"]}] * 2
        assert (
            "the limit is 100"
            in check_error(storing.http.post(RESPONSES, json=BASE | {"input": references}), 400)["message"]
        )

    def test_results_of_calls_need_no_call(self, storing):
        clock = {"type": "function", "name": "clock"}
        first = create(storing, input=QUESTION, tools=FLAT, tool_choice=clock, parallel_tool_calls=False)
        (call,) = first["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
        create(storing, previous_response_id=first["id"], input=[result], tools=FLAT, max_output_tokens=1)
        error = check_error(storing.http.post(RESPONSES, json=BASE | {"input": [result]}), 400)
        assert "function_call" in error["message"]

    def test_references_to_items(self, storing):
        first = create(storing, input=QUESTION, max_output_tokens=8)
        (item,) = first["output"]
        asked = {"role": "user", "content": QUESTION}
        for reference in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
            fields = {"max_output_tokens": 1, "return_token_ids": True}
            named = create(storing, input=[asked, reference, {"role": "user", "content": NEXT}], **fields)
            given = create(storing, input=[asked, item, {"role": "user", "content": NEXT}], **fields)
            assert named["prompt_token_ids"] == given["prompt_token_ids"]

    def test_retrieved_and_deleted(self, storing):
        client = storing.client()
        made = client.responses.create(model="embedded", input=QUESTION, max_output_tokens=4)
        assert client.responses.retrieve(made.id) == made
        follows = client.responses.create(
            model="embedded", previous_response_id=made.id, input=NEXT, max_output_tokens=4
        )
        client.responses.delete(made.id)
        assert storing.http.delete(f"{RESPONSES}/{follows.id}").json() == {
            "id": follows.id,
            "object": "response",
            "deleted": True,
        }
        for gone in (made.id, follows.id):
            error = check_error(storing.http.get(f"{RESPONSES}/{gone}"), 404)
            assert (error["code"], error["param"]) == ("response_not_found", "response_id")

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
            ({"input": [{"type": "item_reference", "id": "msg_unknown"}]}, "input"),
        ],
        ids=["response", "item"],
    )
    @pytest.mark.parametrize("is_on", [True, False], ids=["with a store", "without"])
    def test_unknown_ids_name_the_flag(self, storing, embedded, fields, param, is_on):
        server = storing if is_on else embedded
        error = check_error(server.http.post(RESPONSES, json=BASE | {"input": NEXT} | fields), 404)
        assert error["param"] == param
        assert "--responses-store-mb" in error["message"]
        assert ("stores no responses" in error["message"]) is not is_on


def test_another_key_finds_nothing(locked):
    alice, bob = (locked.client(api_key=key).responses for key in (ALICE, BOB))
    made = alice.create(model="embedded", input=QUESTION, max_output_tokens=2)
    headers = {"authorization": f"Bearer {BOB}"}
    reference = {"input": [{"type": "item_reference", "id": made.output[0].id}]}
    for fields in ({"input": NEXT, "previous_response_id": made.id}, reference):
        check_error(locked.http.post(RESPONSES, json=BASE | fields, headers=headers), 404)
    for method in ("GET", "DELETE"):
        check_error(locked.http.request(method, f"{RESPONSES}/{made.id}", headers=headers), 404)
        check_error(locked.http.request(method, f"{RESPONSES}/{made.id}"), 401)
    assert alice.retrieve(made.id).id == made.id
    with pytest.raises(Exception, match="not stored"):
        bob.retrieve(made.id)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def response_of(identifier: str, text: str = "") -> dict:
    return {"id": identifier, "output": [{"id": f"msg_{identifier}", "type": "message", "text": text}]}


class TestBounds:
    def put(self, store: ResponseStore, name: str, text: str = "", before: str | None = None, tenant: str = "") -> bool:
        turn = None if before is None else store.get((tenant, before), "x")
        return store.put((tenant, name), [text], response_of(name), turn)

    def has(self, store: ResponseStore, name: str) -> bool:
        try:
            return store.get(("", name), "x").key == ("", name)
        except ApiError:
            return False

    def test_the_oldest_make_room(self):
        store = ResponseStore(11_000)
        for name in "abc":
            assert self.put(store, name, "x" * 2000)
        assert self.put(store, "d", "x" * 2000)
        assert store.used_bytes <= 11_000
        assert [self.has(store, name) for name in "abcd"] == [False, True, True, True]
        assert not self.put(store, "e", "x" * 11_000)
        assert store.used_bytes == len(store) == 0

    def test_a_conversation_counts_each_turn_once(self):
        """Turns are shared, and are free when the last response after them has gone."""
        store = ResponseStore(20_000)
        self.put(store, "a", "x" * 4000)
        alone = store.used_bytes
        for before, name in zip("abcd", "bcde", strict=True):
            self.put(store, name, "y", before=before)
        assert store.used_bytes < 2.5 * alone
        for name in "abcd":
            store.delete(("", name))
        conversation = store.conversation(store.get(("", "e"), "x"))
        assert conversation[::2] == ["x" * 4000, "y", "y", "y", "y"]
        assert [item["id"] for item in conversation[1::2]] == [f"msg_{name}" for name in "abcde"]
        assert store.used_bytes > alone
        store.delete(("", "e"))
        assert store.used_bytes == 0

    def test_a_turn_that_goes_while_its_follow_up_is_generated_is_counted_again(self):
        store = ResponseStore(20_000)
        self.put(store, "a", "x" * 4000)
        alone, turn = store.used_bytes, store.get(("", "a"), "x")
        store.delete(("", "a"))
        assert store.used_bytes == 0
        store.put(("", "b"), ["y"], response_of("b"), turn)
        assert store.used_bytes > alone
        store.delete(("", "b"))
        assert store.used_bytes == 0

    def test_old_ones_are_dropped(self):
        clock = Clock()
        store = ResponseStore(20_000, clock)
        self.put(store, "a")
        clock.now = LONGEST_AGE / 2
        self.put(store, "b", before="a")
        clock.now = LONGEST_AGE
        assert (self.has(store, "a"), self.has(store, "b")) == (False, True)
        clock.now = 2 * LONGEST_AGE
        store.drop_old()
        assert store.used_bytes == len(store) == 0


class TestRay:
    async def test_the_ingress_names_the_owner(self):
        named, owners = new_id("resp", "a" * 8), []

        async def read(request: PromptRequest) -> ReadPrompt:
            owners.append(request.owner)
            return ReadPrompt()

        async def forward(request: ForwardedRequest):
            owners.append(request.owner)
            yield {"type": "http.response.start", "status": 200, "headers": []}
            yield {"type": "http.response.body", "body": b"", "more_body": False}

        transport = httpx.ASGITransport(IngressApp(read, forward, 1000, AnswerMemory(0)))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            await client.post(RESPONSES, json={"previous_response_id": named, "input": "x"})
            await client.get(f"{RESPONSES}/{named}")
            await client.post("/v1/chat/completions", json={"messages": [], "previous_response_id": named})
        assert owners == ["a" * 8] * 3 + [None] * 2

    async def test_prompts_are_those_that_the_route_computes(self, storing):
        """RP-2: a follow-up is read by the replica that has what it continues, and by no other."""
        first = create(storing, input=QUESTION, max_output_tokens=2)
        body = {"previous_response_id": first["id"], "input": NEXT, "max_output_tokens": 3}
        asked = PromptRequest(RESPONSES, b"", json.dumps(body).encode(), known={})
        read = await read_prompt(storing.serving, asked)
        computed = create(storing, **body, return_token_ids=True)
        assert [list(one) for one in read.tokens] == [computed["prompt_token_ids"]]
        assert read.new_tokens == 3
        unknown = json.dumps(body | {"previous_response_id": "resp_x"}).encode()
        assert (await read_prompt(storing.serving, replace(asked, body=unknown))).tokens == ()
