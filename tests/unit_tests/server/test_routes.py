"""SE-5, SE-6: routes for clients and operators beside those that generate: permissions and contents."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import hmac
import re
import threading
from concurrent.futures import Future

import pytest

import megatron_ext
from megatron_ext.server.api_keys import Keys
from megatron_ext.server.http.body import SENDER_HEADER
from tests.unit_tests.server.test_errors import check_error
from tests.unit_tests.support.server import PATIENCE, LiveServer, embedded_engine, tiny_engine

KEY = "the-only-key"
OPEN = ("/ping", "/version", "/health", "/docs", "/openapi.json")
KEYED = (
    ("GET", "/load", {}),
    ("GET", "/tokenizer_info", {}),
    ("POST", "/tokenize", {"json": {"prompt": "<1>"}}),
    ("POST", "/detokenize", {"json": {"tokens": [1]}}),
)
TEXT = "The import statement"
NEVER = 10 * PATIENCE  # seconds, more than a test takes


@pytest.fixture(scope="module")
def locked(serve) -> LiveServer:
    return serve(tiny_engine(), api_key=KEY)


@pytest.fixture(scope="module")
def talking(serve) -> LiveServer:
    return serve(embedded_engine(), "embedded")


class TestWhoMayAsk:
    @pytest.mark.parametrize("path", OPEN)
    def test_without_a_key(self, locked, path):
        assert locked.http.get(path).status_code == 200

    @pytest.mark.parametrize(("method", "path", "options"), KEYED)
    def test_with_the_key(self, locked, method, path, options):
        check_error(locked.http.request(method, path, **options), 401)
        headers = {"Authorization": f"Bearer {KEY}"}
        assert locked.http.request(method, path, headers=headers, **options).status_code == 200

    @pytest.mark.parametrize("given", [b"a", b"b", b"wrong", b""])
    def test_keys_take_as_long_whichever_is_given(self, monkeypatch, given):
        """SE-5: each is compared, in constant time, whether one before it was right."""
        keys, compared = Keys(["a", "b", "c"], "admin"), []
        compare = hmac.compare_digest
        monkeypatch.setattr(hmac, "compare_digest", lambda *pair: compared.append(pair) or compare(*pair))
        assert (keys.caller(given) is not None) is (given in (b"a", b"b"))
        assert len(compared) == 4
        assert {len(mark) for pair in compared for mark in pair} == {64}


def test_answers_of_simple_routes(tiny):
    assert tiny.http.get("/version").json() == {"version": megatron_ext.__version__}
    assert tiny.http.get("/ping").json() == tiny.http.post("/ping").json() == tiny.http.get("/health").json()
    load = tiny.http.get("/load").json()
    assert load == {"status": "ok", "server_load": 0, "running": 0, "waiting": 0, "paused": 0, "capacity": 8 + 256}


class TestTokens:
    def test_a_text_and_back(self, talking):
        """Token counts of `/v1/completions` agree with `/tokenize`."""
        told = talking.http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()
        assert told["tokens"] == talking.serving.tokenizer.tokenize(TEXT)
        assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 4096)
        assert "".join(told["token_strs"]) == TEXT
        assert talking.http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": TEXT}
        usage = talking.http.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens"] == told["count"]

    def test_a_conversation(self, talking):
        body = {"messages": [{"role": "user", "content": TEXT}]}
        told = talking.http.post("/tokenize", json=body).json()
        usage = talking.http.post("/v1/chat/completions", json=body | {"max_tokens": 1}).json()["usage"]
        assert told["count"] == usage["prompt_tokens"]
        assert "<|" in talking.http.post("/detokenize", json={"tokens": told["tokens"]}).json()["prompt"]

    def test_without_special_tokens(self, talking, monkeypatch):
        """A tokenizer that adds one: with the field it does not, and the prompt of a request has it."""
        from tokenizers.processors import TemplateProcessing

        wrapped = talking.serving.tokenizer._backend.wrapped
        bos = wrapped.id_to_token(0)
        monkeypatch.setattr(wrapped, "post_processor", TemplateProcessing(f"{bos} $A", special_tokens=[(bos, 0)]))
        plain = talking.http.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": False}).json()["tokens"]
        for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": None}):
            assert talking.http.post("/tokenize", json={"prompt": TEXT} | fields).json()["tokens"] == [0, *plain]

    @pytest.mark.parametrize(
        ("path", "body", "named"),
        [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "either prompt or messages"),
            ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, "special"),
            ("/tokenize?what=1", {"prompt": "a"}, "what"),
            ("/tokenize", {"prompt": "a " * 200_000}, "the limit of 4096 tokens"),
            ("/detokenize", {"tokens": "a"}, "valid list"),
            ("/detokenize", {"tokens": [True]}, "valid integer"),
            ("/detokenize", {"tokens": [-1]}, "-1"),
            ("/detokenize", {"tokens": [10**30]}, "10000"),
            ("/detokenize", {"tokens": [1] * 4097}, "4096"),
        ],
        ids=str,
    )
    def test_refused_by_name(self, talking, path, body, named):
        assert named in check_error(talking.http.post(path, json=body), 400)["message"]

    def test_describes_the_tokenizer(self, talking):
        """The route serves `tokenizer_backend=remote` of lm_eval, which encodes the end's text to find its id."""
        info = talking.http.get("/tokenizer_info").json()
        end = talking.serving.tokenizer.eod
        assert info["eos_token_id"] == end
        encoded = talking.http.post("/tokenize", json={"prompt": info["eos_token"], "add_special_tokens": False})
        assert encoded.json()["tokens"] == [end]
        assert info["chat_template"] == talking.serving.tokenizer.chat_template
        assert info["bos_token"] is None

    def test_tokenize_takes_template_options(self, talking):
        """RP-2: `/tokenize` gives the tokens of a conversation from which its answer is made."""
        body = {
            "messages": [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "is"}],
            "continue_final_message": True,
        }
        told = talking.http.post("/tokenize", json=body).json()["tokens"]
        assert told != talking.http.post("/tokenize", json={"messages": body["messages"]}).json()["tokens"]
        answer = talking.http.post("/v1/chat/completions", json={**body, "max_tokens": 1, "return_token_ids": True})
        assert answer.json()["prompt_token_ids"] == told
        refused = talking.http.post("/tokenize", json={"prompt": TEXT, "tools": []})
        assert "are for messages" in check_error(refused, 400)["message"]


def test_load_of_other_routers(talking):
    """RP-2: requests in flight that the asking router has not sent, with their tokens; their end is told."""
    requests, begun, go_on = talking.serving.requests, threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go_on.wait(PATIENCE)

    async def load_of_others(sender: str) -> tuple[int, int, int]:
        return requests.load_of_others(sender)

    def others(sender: str) -> tuple[int, int, int]:
        return asyncio.run_coroutine_threadsafe(load_of_others(sender), talking.loop).result(PATIENCE)

    def end_of_others(patience: float) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(requests.wait_for_others("one", patience), talking.loop)

    blocking = requests.client.call(slow)
    assert begun.wait(PATIENCE)
    threads = []
    for sender, length in (("one", 10), ("two", 20), (None, 30)):
        headers = {} if sender is None else {SENDER_HEADER: sender}
        body = {"prompt": [5] * length, "max_tokens": length // 10, "n": 2}
        ask = functools.partial(talking.http.post, "/v1/completions", json=body, headers=headers)
        threads.append(threading.Thread(target=ask))
        threads[-1].start()
        talking.wait_until(lambda: requests.living == 2 * len(threads))
        if len(threads) == 1:
            end_of_others(NEVER).result(PATIENCE)
    end = end_of_others(NEVER)
    end_of_others(0).result(PATIENCE)
    assert not end.done()
    assert others("one") == (4, 100, 10)
    assert others("two") == (4, 80, 8)
    assert others("three") == others("") == (6, 120, 12)
    go_on.set()
    blocking.result(PATIENCE)
    end.result(PATIENCE)
    for thread in threads:
        thread.join(PATIENCE)
    assert others("three") == (0, 0, 0)


class TestDescription:
    def test_the_page_needs_nothing_from_elsewhere(self, locked):
        """Its script and its styles are the server's, of a package, and no other script may run."""
        page = locked.http.get("/docs")
        (script,) = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = page.headers["content-security-policy"]
        assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}' 'self'; ")
        assert "url: 'openapi.json'" in script
        files = set(re.findall(r"(?:src|href)=\"?([^\"#> ]+)", page.text)) - {"data:,"}
        assert files == {"docs/swagger-ui-bundle.js", "docs/swagger-ui.css"}
        for file in files:
            answer = locked.http.get(f"/{file}")
            assert answer.status_code == 200, file
            assert len(answer.content) > 100_000, file

    def test_keys_and_errors(self, locked, tiny):
        """SE-6: which routes want a key, the form of their errors, and which answers are streams."""
        description = locked.http.get("/openapi.json").json()
        paths = description["paths"]
        assert "security" not in paths["/health"]["get"]
        assert description["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
        completions, messages = paths["/v1/completions"]["post"], paths["/v1/messages"]["post"]
        assert completions["security"] == [{"key": []}]
        forms = [
            route["responses"]["default"]["content"]["application/json"]["schema"] for route in (completions, messages)
        ]
        assert [form["required"] for form in forms] == [["error"], ["type", "error", "request_id"]]
        for route in (completions, messages):
            assert set(route["responses"]) == {"200", "default"}
            assert "text/event-stream" in route["responses"]["200"]["content"]
        assert "text/plain" in paths["/metrics"]["get"]["responses"]["200"]["content"]
        assert "security" not in tiny.http.get("/openapi.json").json()["paths"]["/v1/completions"]["post"]


class TestOtherOrigins:
    """SE-5: off, unless a flag names them."""

    PAGE = "https://app.example"

    def preflight(self, server: LiveServer, origin: str):
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        asked["Access-Control-Request-Headers"] = "authorization, content-type"
        return server.http.options("/v1/completions", headers=asked)

    def test_off(self, locked):
        answer = self.preflight(locked, self.PAGE)
        assert answer.status_code in (401, 405)
        headers = {"Authorization": f"Bearer {KEY}", "Origin": self.PAGE}
        for answered in (answer, locked.http.get("/v1/models", headers=headers)):
            assert "access-control-allow-origin" not in answered.headers
        check_error(locked.http.post("/v1/completions", headers=headers, json={"prompt": [1]}), 403)

    @pytest.mark.parametrize("allowed", [PAGE, "*"])
    def test_on(self, serve, allowed):
        server = serve(tiny_engine(), api_key=KEY, cors_allowed_origins=(allowed,))
        shown = {allowed, self.PAGE}
        answer = self.preflight(server, self.PAGE)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] in shown
        headers = {"Authorization": f"Bearer {KEY}", "Origin": self.PAGE}
        body = {"prompt": [1], "max_tokens": 1}
        answer = server.http.post("/v1/completions", headers=headers, json=body)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] in shown
        check_error(server.http.post("/v1/completions", headers={"Origin": self.PAGE}, json=body), 401)
        for other in ("https://app.example:8443", "http://app.example", "null", "https://evil.example"):
            answer = server.http.post("/v1/completions", headers=headers | {"Origin": other}, json=body)
            assert answer.status_code == (200 if allowed == "*" else 403), other
