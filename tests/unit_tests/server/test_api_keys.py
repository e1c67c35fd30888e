"""Keys and tenants: permissions, and the information that a neighbour can learn (SE-3)."""

from __future__ import annotations

import itertools
import os
import re

import pytest
from starlette.responses import Response
from starlette.testclient import TestClient

from megatron_ext.config import ServerConfig
from megatron_ext.errors import ConfigError
from megatron_ext.prefix_cache.public_hash import public_hash
from megatron_ext.server.api_keys import Keys, load_keys
from megatron_ext.server.http.auth import AuthMiddleware
from tests.unit_tests.server.test_errors import check_error
from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.server import LiveServer, tiny_engine

PROMPT = make_prompt(40, seed=3)
ALICE, BOB, ADMIN = "alice's key", "bob's key", "the admin's"
ADMIN_PATHS = [("GET", "/prefix_cache"), ("POST", "/reset_prefix_cache")]


def complete(server: LiveServer, key: str | None, **fields):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0} | fields
    return server.http.post("/v1/completions", json=body, headers=headers)


def cached(server: LiveServer, key: str | None, **fields) -> int:
    response = complete(server, key, **fields)
    assert response.status_code == 200, response.text
    server.check_idle()
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask(server: LiveServer, key: str | None, method: str, path: str):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return server.http.request(method, path, headers=headers)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "api").write_text(f"{ALICE}\n\n{BOB}\r\n")
    (folder / "admin").write_text(ADMIN)
    return {"api_key_file": str(folder / "api"), "admin_key_file": str(folder / "admin")}


@pytest.fixture(scope="module")
def shared(serve, files) -> LiveServer:
    """Two tenants and an administrator."""
    return serve(tiny_engine(), **files)


@pytest.fixture(scope="module")
def headless(serve, files) -> LiveServer:
    """Server with two tenants and no administrator."""
    return serve(tiny_engine(), api_key_file=files["api_key_file"])


@pytest.fixture(scope="module")
def discreet(serve, files) -> LiveServer:
    """Two tenants, an administrator, and no counts for the tenants."""
    return serve(tiny_engine(), hide_cache_counts=True, **files)


class TestTenants:
    def test_a_key_hits_only_prefixes_of_its_own_requests(self, shared):
        """SE-3, EX-3: this holds for any salt, including none and another tenant's."""
        shared.reset_cache()
        salts = [None, "", "x"]
        for salt in salts:
            assert cached(shared, ALICE, cache_salt=salt) == 0
        for salt in salts:
            assert cached(shared, ALICE, cache_salt=salt) == 32
        alice = load_keys(shared.serving.settings).caller(ALICE.encode()).tenant
        for salt in [*salts, alice, f"{alice}:", f"{alice}:x", f":{alice}"]:
            assert cached(shared, BOB, cache_salt=salt) == 0

    def test_the_same_key_is_the_same_tenant_in_every_process(self, files):
        """Replicas must find what another cached: nothing of the process goes into the salts, and not the key."""
        settings = ServerConfig(**files)
        first, second = (load_keys(settings).caller(ALICE.encode()) for _ in range(2))
        assert first == second
        assert first.bind("x") == second.bind("x")
        assert ALICE not in first.bind("x")
        single = load_keys(ServerConfig(api_key=ALICE)).caller(ALICE.encode())
        assert single.bind(None) == first.bind(None)

    def test_bound_salts_never_meet(self):
        """Different pairs of key and salt make different salts; this includes the absent key."""
        keys = Keys(["a", "ab"], "admin")
        callers = [keys.caller(b"a"), keys.caller(b"ab"), Keys().stranger]
        tenants = [caller.tenant for caller in callers]
        salts = list(dict.fromkeys([None, "", ":", "a", *tenants, *(f"{one}:" for one in tenants), "\ud800"]))
        bound = [caller.bind(salt) for caller, salt in itertools.product(callers[:2], salts)]
        assert len(set(bound)) == len(bound)
        assert [Keys().stranger.bind(salt) for salt in salts] == salts


class TestAdministrators:
    @pytest.mark.parametrize(("method", "path"), ADMIN_PATHS)
    def test_only_the_admin_key_opens_routes_for_all_tenants(self, shared, method, path):
        """SE-3: a tenant gets a 403, and the cache is as before."""
        assert cached(shared, ALICE) in (0, 32)
        for key in (ALICE, BOB):
            error = check_error(ask(shared, key, method, path), 403)
            assert (error["code"], "admin key" in error["message"]) == ("key_not_allowed", True)
        for key in (None, "wrong"):
            assert check_error(ask(shared, key, method, path), 401)["code"] == "invalid_api_key"
        assert cached(shared, ALICE) == 32
        assert ask(shared, ADMIN, method, path).status_code == 200
        assert cached(shared, ALICE) == (0 if method == "POST" else 32)

    @pytest.mark.parametrize(("prefix", "hosts"), [("", ()), ("/small", ("*",))])
    def test_a_prefix_of_routes_opens_nothing(self, files, prefix, hosts):
        """SE-3: a proxy may serve all paths below one of its own, under any name."""
        settings = ServerConfig(**files, allowed_hosts=hosts)
        http = TestClient(AuthMiddleware(Response(), settings, load_keys(settings)), root_path=prefix)
        for key, status in ((ALICE, 403), (ADMIN, 200)):
            asked = {"authorization": f"Bearer {key}"}
            assert http.get(f"{prefix}/prefix_cache", headers=asked).status_code == status

    @pytest.mark.parametrize(("method", "path"), ADMIN_PATHS)
    def test_of_several_keys_none_is_the_admins(self, headless, method, path):
        """SE-3: these routes stay closed without an admin key, and the message names what would open them."""
        for key in (ALICE, BOB):
            assert "--admin-key-file" in check_error(ask(headless, key, method, path), 403)["message"]
        assert ask(headless, None, method, path).status_code == 401
        assert cached(headless, ALICE) in (0, 32)

    @pytest.mark.parametrize(
        ("keys", "opened"),
        [
            (Keys(["a"]), {"": (False, False), "a": (True, True)}),
            (Keys(["a"], "admin"), {"a": (True, False), "admin": (False, True)}),
            (Keys([], "admin"), {"": (True, False), "admin": (False, True)}),
            (load_keys(ServerConfig(hide_cache_counts=True), {}), {"": (True, False)}),
            (load_keys(ServerConfig(hide_cache_counts=True, api_key="a"), {}), {"a": (True, False)}),
        ],
    )
    def test_a_key_opens_what_is_its_callers(self, keys, opened):
        """SE-3: generation, and all tenants' routes, which a single API key opens unless counts are hidden."""
        for key, expected in opened.items():
            caller = keys.caller(key.encode()) or keys.stranger
            assert (caller.can_generate, caller.can_administrate) == expected


class TestHiddenCounts:
    def test_answers_hide_cached_token_counts(self, discreet):
        """SE-3: cached tokens are shown neither whole nor streamed; prompt and generated tokens are still counted."""
        for _ in range(2):
            usage = complete(discreet, ALICE).json()["usage"]
            assert usage == {"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42}
            discreet.check_idle()
        parts = discreet.client(api_key=ALICE).completions.create(
            model="tiny", prompt=PROMPT, max_tokens=2, stream=True, stream_options={"include_usage": True}
        )
        usage = [part.usage for part in parts if part.usage is not None][-1]
        assert (usage.prompt_tokens, usage.prompt_tokens_details) == (40, None)

    @pytest.mark.parametrize("path", ["/metrics", "/metrics/history", "/prefix_cache"])
    def test_neither_do_the_counts_of_all(self, discreet, path):
        """SE-3: a client that reads `/metrics` after its prompt would learn its skipped tokens."""
        assert [ask(discreet, key, "GET", path).status_code for key in (None, ALICE, ADMIN)] == [401, 403, 200]
        assert discreet.http.get("/health").status_code == 200


class TestDigests:
    def test_shown_hashes_cannot_be_computed_outside(self, tiny):
        """SE-3: prompt, model and salt give a block's keys, and those are not what is shown."""
        tiny.reset_cache()
        for _ in range(2):
            assert cached(tiny, None) in (0, 32)
        (prefix,) = tiny.engine.core.hottest_prefixes(1)
        shared = [tiny.http.get("/prefix_cache").json()["hottest_prefixes"][0]["digest"] for _ in range(2)]
        assert shared == [public_hash(prefix.block_hash)] * 2, "equal for as long as the process lives"
        assert re.fullmatch("[0-9a-f]{64}", shared[0])
        assert shared[0] != prefix.block_hash.hex()
        assert prefix.block_hash.hex() not in tiny.http.get("/prefix_cache").text


class TestSources:
    @pytest.fixture(autouse=True)
    def _no_variable(self, monkeypatch):
        monkeypatch.delenv("MEGATRON_EXT_API_KEY", raising=False)

    def test_the_variable(self, serve, monkeypatch):
        """SE-3: the variable keeps the key out of the list of processes."""
        monkeypatch.setenv("MEGATRON_EXT_API_KEY", ALICE)
        server = serve(tiny_engine())
        assert cached(server, ALICE) == 0
        assert complete(server, None).status_code == complete(server, BOB).status_code == 401
        assert ask(server, ALICE, "GET", "/prefix_cache").status_code == 200

    @pytest.mark.parametrize(
        ("variable", "settings", "named"),
        [
            (ALICE, {"api_key": BOB}, ("MEGATRON_EXT_API_KEY", "--api-key")),
            (ALICE, {"api_key": ALICE}, ("MEGATRON_EXT_API_KEY", "--api-key")),
            (ALICE, {"api_key_file": "keys"}, ("MEGATRON_EXT_API_KEY", "--api-key-file")),
            (None, {"api_key": ALICE, "api_key_file": "keys"}, ("--api-key", "--api-key-file")),
            ("", {}, ("MEGATRON_EXT_API_KEY", "unset it")),
            ("é", {}, ("MEGATRON_EXT_API_KEY", "ASCII")),
        ],
    )
    def test_two_sources_are_an_error(self, variable, settings, named):
        """SE-3: neither source takes precedence; the keys are not in the message."""
        environment = {} if variable is None else {"MEGATRON_EXT_API_KEY": variable}
        with pytest.raises(ConfigError) as caught:
            load_keys(ServerConfig(**settings), environment)
        assert all(part in str(caught.value) for part in named)
        assert ALICE not in str(caught.value)

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            (b"", "no key"),
            (b"\n\n", "no key"),
            (b"one\ntwo\none\n", "line 3"),
            (b"one\n two\n", "line 2"),
            (b"# a comment\none\n", "line 1: a key begins with #"),
            (b"one\n\xff\n", "not a text file in UTF-8"),
            ("abcdefgh\u2028ijklmnop\n".encode(), "line 1"),
            (b"x" * (1 << 20) + b"y", "must have at most 1048576"),
        ],
    )
    def test_files_that_are_no_list_of_keys(self, tmp_path, text, named):
        """The error is one line that quotes no key."""
        file = tmp_path / "keys"
        file.write_bytes(text)
        with pytest.raises(ConfigError, match=named) as caught:
            load_keys(ServerConfig(api_key_file=str(file)), {})
        assert "two" not in str(caught.value)

    def test_files_that_are_not_regular(self, tmp_path):
        """Reading a pipe would wait for its writer."""
        os.mkfifo(tmp_path / "pipe")
        for name, kind in ((".", "a directory"), ("pipe", "a named pipe")):
            with pytest.raises(ConfigError, match=f"^--api-key-file .*: {kind}; only a regular file .*; give a file"):
                load_keys(ServerConfig(api_key_file=str(tmp_path / name)), {})

    def test_one_admin_key_which_is_no_other(self, tmp_path):
        for text, why in (("a\nb", "2 keys"), (ALICE, "also an API key")):
            (tmp_path / "admin").write_text(text)
            with pytest.raises(ConfigError, match=f"^--admin-key-file .*{why}"):
                load_keys(ServerConfig(api_key=ALICE, admin_key_file=str(tmp_path / "admin")), {})
