"""What the server shows of its cache: metrics, the cache's own route, the page."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_ext.config import CacheConfig
from megatron_ext.scheduling.accounting import Reason
from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.server import LiveServer, tiny_engine

ROOT = Path(__file__).resolve().parents[4]
PROMPT = make_prompt(40, seed=3)


def complete(server: LiveServer, prompt=PROMPT, **fields) -> dict:
    response = server.http.post("/v1/completions", json={"prompt": prompt, "temperature": 0} | fields)
    assert response.status_code == 200, response.text
    server.check_idle()
    return response.json()


@pytest.fixture(scope="module")
def fresh(serve) -> LiveServer:
    """A server of one test after the other, in order."""
    return serve(tiny_engine())


class TestMetrics:
    def test_before_the_first_request_everything_is_there(self, fresh):
        for name in ("requests_total", "prompt_tokens_computed_total"):
            assert f"megatron_ext_{name}{{" in fresh.http.get("/metrics").text
        assert fresh.metric("prompt_tokens_skipped_total") == 0
        assert fresh.metric("kv_blocks") == 200
        assert fresh.metric("state_slots") == 16
        assert fresh.metric("info", model="tiny") == 1

    def test_what_a_few_requests_leave(self, fresh):
        """EX-2: skipped and computed tokens by reason, as in the requests' own usage."""
        usages = [
            complete(fresh, max_tokens=4)["usage"],
            complete(fresh, max_tokens=4)["usage"],
            complete(fresh, max_tokens=4, enable_prefix_caching=False)["usage"],
            complete(fresh, max_tokens=4, echo=True, logprobs=0)["usage"],
        ]
        details = [usage["prompt_tokens_details"] for usage in usages]
        assert fresh.metric("prompt_tokens_skipped_total") == sum(one["cached_tokens"] for one in details) == 32
        for reason in Reason:
            expected = sum(one["computed_tokens_by_reason"].get(reason.value, 0) for one in details)
            assert fresh.metric("prompt_tokens_computed_total", reason=reason.value) == expected, reason
        assert fresh.metric("prompt_tokens_computed_total", reason="opted_out") == 40
        assert fresh.metric("tokens_generated_total") == 16
        assert fresh.metric("requests_total", outcome="length") == 4
        assert fresh.metric("prefix_cache_hits_total") == 1
        assert fresh.metric("kv_blocks_cached") == fresh.metric("kv_blocks_evictable") == 2
        assert fresh.metric("kv_blocks_in_use") == 0
        assert fresh.metric("state_slots_used") == 1
        assert fresh.metric("snapshots_taken_total") == 1

    def test_times(self, fresh):
        """One first token a request, and a gap before each other token."""
        assert fresh.metric("time_to_first_token_seconds_count") == 4
        assert fresh.metric("inter_token_seconds_count") == 12
        assert fresh.metric("request_seconds_count") == 4
        total, first = (fresh.metric(f"{name}_sum") for name in ("request_seconds", "time_to_first_token_seconds"))
        assert 0 < first + fresh.metric("inter_token_seconds_sum") <= total * 1.5

    def test_each_name_is_documented(self, fresh):
        text = (ROOT / "docs" / "server.md").read_text()
        families = list(text_string_to_metric_families(fresh.http.get("/metrics").text))
        assert len(families) > 20
        for family in families:
            name = family.name + ("_total" if family.type == "counter" else "")
            if not name.endswith("_created"):
                assert f"`{name}`" in text, name

    def test_the_type_of_the_text(self, fresh):
        assert fresh.http.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


class TestCacheRoute:
    def test_sizes_use_and_hottest_prefixes(self, fresh):
        """EX-6: tokens and hits of prefixes, and no text: digests are 32 bytes of hexadecimal digits."""
        fresh.reset_cache()
        other = make_prompt(20, seed=9)
        for prompt, times in ((PROMPT, 3), (other, 2)):
            for _ in range(times):
                complete(fresh, prompt, max_tokens=1)
        shown = fresh.http.get("/prefix_cache").json()
        assert shown["geometry"]["block_size_tokens"] == 16
        assert shown["occupancy"] == fresh.engine.prefix_cache_statistics()
        assert [(one["tokens"], one["hits"]) for one in shown["hottest_prefixes"]] == [(32, 2), (16, 1)]
        assert all(re.fullmatch("[0-9a-f]{64}", one["digest"]) for one in shown["hottest_prefixes"])
        assert "<" not in fresh.http.get("/prefix_cache").text

    def test_equal_prompts_of_two_tenants_have_two_digests(self, fresh):
        """EX-3."""
        fresh.reset_cache()
        for salt in ("a", "a", "b", "b"):
            complete(fresh, cache_salt=salt)
        digests = {one["digest"] for one in fresh.http.get("/prefix_cache").json()["hottest_prefixes"]}
        assert len(digests) == 2

    def test_reset_empties_the_cache(self, fresh):
        """EX-4: nothing cached before is matched after."""
        complete(fresh)
        assert complete(fresh)["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        occupancy = fresh.http.post("/reset_prefix_cache").json()["occupancy"]
        assert (occupancy["blocks_cached"], occupancy["slots_used"]) == (0, 0)
        assert fresh.http.get("/prefix_cache").json()["hottest_prefixes"] == []
        assert fresh.metric("kv_blocks_cached") == 0
        assert complete(fresh)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    def test_with_caching_off_there_is_nothing_to_show(self, serve):
        server = serve(tiny_engine(cache=CacheConfig(enable_prefix_caching=False)))
        complete(server)
        shown = server.http.get("/prefix_cache").json()
        assert (shown["occupancy"], shown["hottest_prefixes"]) == (None, [])
        assert server.http.post("/reset_prefix_cache").json() == {"occupancy": None}
        assert server.metric("prompt_tokens_computed_total", reason="caching_off") == 40


class _Page(HTMLParser):
    """Texts of elements by id, and the paths drawn."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.paths: list[str] = []
        self._id = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        attributes = dict(attributes)
        self._id = attributes.get("id", self._id)
        if tag == "path":
            self.paths.append(attributes["d"])

    def handle_data(self, data: str) -> None:
        self.texts[self._id] = self.texts.get(self._id, "") + data.strip()


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class TestPage:
    def test_it_needs_nothing_from_elsewhere(self, fresh):
        response = fresh.http.get("/")
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert not re.search(r"(src|href)=(?![\"']?data:)|https?://|@import", response.text)

    @pytest.mark.skipif(chromium() is None, reason="no Chromium is installed")
    def test_it_draws_what_the_metrics_say(self, fresh, tmp_path):
        complete(fresh, max_tokens=2)
        complete(fresh, max_tokens=2)
        command = [chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=9000", "--dump-dom", f"{fresh.url}/"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        page = _Page(done.stdout)
        assert page.texts["model"] == "tiny", done.stderr
        skipped = fresh.metric("prompt_tokens_skipped_total")
        computed = sum(fresh.metric("prompt_tokens_computed_total", reason=reason.value) for reason in Reason)
        assert page.texts["skipped-share"].startswith(f"{100 * skipped / (skipped + computed):.1f}".rstrip("0."))
        requests = sum(fresh.metric("requests_total", outcome=one) for one in ("stop", "length", "aborted", "failed"))
        assert page.texts["requests"].startswith(f"{requests:.0f}")
        assert f"of {fresh.metric('kv_blocks'):.0f}" in page.texts["kv-blocks"]
        assert f"{fresh.metric('kv_blocks_evictable'):.0f}" in page.texts["kv-blocks"]
        assert "every 2 s" in page.texts["state"]
        curves = [path for path in page.paths if path.count("L") >= 2]
        assert len(curves) >= 3, "KV blocks in use, KV blocks cached, snapshots"
