"""Pages of other origins can neither read answers nor empty the cache (SE-3, issue on attacks: point 1)."""

from __future__ import annotations

import http.client

import pytest

from megatron_ext.config.hosts import HostName, parse_host
from tests.unit_tests.server.test_errors import check_error
from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.server import PATIENCE, LiveServer, tiny_engine

PROMPT = make_prompt(40, seed=3)
BODY = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}
PATHS = [
    ("GET", "/"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/prefix_cache"),
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/nowhere"),
]


def port(server: LiveServer) -> int:
    return int(server.url.rpartition(":")[2])


def ask(server: LiveServer, method: str, path: str, **headers: str):
    return server.http.request(method, path, json=BODY if method == "POST" else None, headers=headers)


@pytest.fixture(scope="module")
def named(serve) -> LiveServer:
    return serve(tiny_engine(), allowed_hosts=("models.example", "other.example:8443"))


class TestHosts:
    @pytest.mark.parametrize(("method", "path"), PATHS)
    def test_a_name_that_was_made_to_point_here_is_refused(self, tiny, method, path):
        """SE-3: DNS rebinding; its name stands in the Host header, whatever the port."""
        for host in ("evil.example", f"evil.example:{port(tiny)}", "127.0.0.1.evil.example", "localhost@evil.example"):
            error = check_error(ask(tiny, method, path, host=host), 403)
            assert error["code"] == "host_not_allowed"
            assert repr(host) in error["message"]
            assert "--allowed-hosts" in error["message"]

    @pytest.mark.parametrize(
        "host", ["localhost", "LOCALHOST:99", "localhost.", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[0:0::1]:8000"]
    )
    def test_the_loopback_names_are_allowed(self, tiny, host):
        """SE-3: any port is allowed, because ports are forwarded."""
        assert ask(tiny, "GET", "/health", host=host).status_code == 200

    def test_without_a_host_or_with_two_nothing_is_told(self, tiny):
        for hosts in ([], ["localhost", "evil.example"]):
            connection = http.client.HTTPConnection("127.0.0.1", port(tiny), timeout=PATIENCE)
            connection.putrequest("GET", "/prefix_cache", skip_host=True)
            for host in hosts:
                connection.putheader("Host", host)
            connection.endheaders()
            assert connection.getresponse().status in (400, 403), "h11 refuses some of them by itself"
            connection.close()

    def test_named_hosts_replace_the_default(self, named):
        """SE-3: a host with a port is that port only."""
        for host in ("models.example", "Models.Example:1", "other.example:8443"):
            assert ask(named, "GET", "/health", host=host).status_code == 200
        for host in ("localhost", "other.example", "other.example:8444", "x.models.example"):
            assert ask(named, "GET", "/health", host=host).status_code == 403


class TestOrigins:
    def origins(self, server: LiveServer) -> list[str]:
        return [
            "http://evil.example",
            "null",
            "http://127.0.0.1:1",
            "http://127.0.0.1",
            f"http://localhost:{port(server)}",  # another origin than 127.0.0.1
            f"ftp://127.0.0.1:{port(server)}",
            f"http://evil.example:{port(server)}",
            f"http://127.0.0.1:{port(server)}@evil.example",
            "http://[",
            "",
        ]

    def test_a_page_cannot_empty_the_cache(self, tiny):
        """SE-3: cached blocks are found after every attempt, and a reset of our own page empties the cache."""
        tiny.reset_cache()
        assert ask(tiny, "POST", "/v1/completions").status_code == 200
        for origin in self.origins(tiny):
            error = check_error(ask(tiny, "POST", "/reset_prefix_cache", origin=origin), 403)
            assert error["code"] == "origin_not_allowed"
        usage = ask(tiny, "POST", "/v1/completions").json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 32
        assert ask(tiny, "POST", "/reset_prefix_cache", origin=tiny.url).status_code == 200
        usage = ask(tiny, "POST", "/v1/completions").json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/nowhere"])
    def test_a_page_cannot_post(self, tiny, path):
        """SE-3: posts are refused on every path, before the body is read."""
        before = tiny.metric("tokens_generated_total")
        for origin in self.origins(tiny):
            response = tiny.http.post(path, content=b"{", headers={"origin": origin})
            assert check_error(response, 403)["code"] == "origin_not_allowed"
        assert tiny.metric("tokens_generated_total") == before

    def test_with_a_proxy_that_changes_the_host(self, named):
        """SE-3: pages of hosts that are named by the operator are the server's own."""
        own = ("http://models.example", "https://models.example", "https://other.example:8443")
        foreign = ("http://models.example:8080", "https://other.example", "http://other.example:443")
        for origins, status in ((own, 200), (foreign, 403)):
            for origin in origins:
                found = ask(named, "POST", "/reset_prefix_cache", host="models.example:9", origin=origin).status_code
                assert found == status, origin


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("Example.COM", HostName("example.com")),
        ("example.com.:80", HostName("example.com", 80)),
        ("[2001:DB8:0::1]:443", HostName("2001:db8::1", 443)),
        ("10.0.0.5", HostName("10.0.0.5")),
        *(
            (text, None)
            for text in ("", ":80", "a b", "a/b", "http://a", "a:b", "a:99999", "a:", "a:1:2", "[::1", "[x]")
        ),
        *((text, None) for text in ("[::1]x", "user@a", "a,b", "é.example", "a\x00", "[::1]:", "a:１")),
    ],
)
def test_hosts_as_they_are_written(text, host):
    assert parse_host(text) == host
