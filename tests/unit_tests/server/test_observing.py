"""Views of the server's cache: metrics, the cache's own route, the page."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_ext.scheduling.explanation import Reason
from megatron_ext.server.http.status_page import FLEET_PAGE
from megatron_ext.server.monitoring.cache_view import CacheView
from megatron_ext.server.monitoring.metrics import INTERVAL, History, Metrics
from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.server import LiveServer, tiny_engine

PROMPT = make_prompt(40, seed=3)


def complete(server: LiveServer, prompt=PROMPT, **fields) -> dict:
    response = server.http.post("/v1/completions", json={"prompt": prompt, "temperature": 0} | fields)
    assert response.status_code == 200, response.text
    server.check_idle()
    return response.json()


@pytest.fixture(scope="module")
def fresh(serve) -> LiveServer:
    """A server of one test after the other."""
    return serve(tiny_engine())


@pytest.fixture(scope="module")
def counted(serve) -> tuple[LiveServer, list[dict]]:
    """A server that has served four requests, and their usage."""
    server = serve(tiny_engine())
    others = ({}, {}, {"enable_prefix_caching": False}, {"echo": True, "logprobs": 0})
    return server, [complete(server, max_tokens=4, **fields)["usage"] for fields in others]


class TestMetrics:
    def test_counts_of_a_few_requests(self, counted):
        """EX-2: skipped and computed tokens by reason, as in the requests' own usage."""
        server, usages = counted
        details = [usage["prompt_tokens_details"] for usage in usages]
        assert server.metric("prompt_tokens_skipped_total") == sum(one["cached_tokens"] for one in details) == 32
        for reason in Reason:
            expected = sum(one["computed_tokens_by_reason"].get(reason.value, 0) for one in details)
            assert server.metric("prompt_tokens_computed_total", reason=reason.value) == expected, reason
        assert server.metric("prompt_tokens_computed_total", reason="opted_out") == 40
        assert server.metric("tokens_generated_total") == 16
        assert server.metric("requests_total", outcome="length") == 4
        assert server.metric("prefix_cache_hits_total") == 1
        assert server.metric("kv_blocks_cached") == server.metric("kv_blocks_evictable") == 2
        assert server.metric("kv_blocks_in_use") == 0
        assert server.metric("state_slots_used") == 1
        assert server.metric("snapshots_taken_total") == 1


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
        assert shown["occupancy"] == fresh.engine.core.statistics().prefix_cache()
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
        """EX-4: no block from before the reset is matched afterwards."""
        complete(fresh)
        assert complete(fresh)["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        occupancy = fresh.http.post("/reset_prefix_cache").json()["occupancy"]
        assert (occupancy["blocks_cached"], occupancy["slots_used"]) == (0, 0)
        assert fresh.http.get("/prefix_cache").json()["hottest_prefixes"] == []
        assert fresh.metric("kv_blocks_cached") == 0
        assert complete(fresh)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    def test_a_reset_as_a_search_ends_leaves_an_empty_list(self, fresh, monkeypatch):
        """EX-4: a caller that waited for the search sees the cache as it is after the reset."""
        look = CacheView._look

        async def look_and_reset(view: CacheView) -> None:
            await look(view)
            view._hottest = None  # as `reset` does before the caller goes on

        monkeypatch.setattr(CacheView, "_look", look_and_reset)
        assert fresh.http.get("/prefix_cache").json()["hottest_prefixes"] == []


class TestHistory:
    """The page is not empty when it is opened late."""

    def test_the_oldest_samples_go(self):
        metrics = Metrics("tiny")
        history = History(metrics, kept=3)
        for _ in range(5):
            metrics.rejected.inc()
            history.sample()
        metrics.rejected.inc(10)
        shown = history.since(0.0)
        assert (shown["interval"], shown["kept"], len(shown["times"])) == (INTERVAL, 3, 4)
        assert shown["series"]["requests_rejected_total"] == [3, 4, 5, 15], "the last one is how it is now"
        assert shown["times"] == sorted(shown["times"])
        later = history.since(history._samples[1][0])
        assert later["series"]["requests_rejected_total"] == [5, 15]


class _Page(HTMLParser):
    """Texts and attributes of elements by id, the paths drawn, and which elements there are."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.attributes: dict[str, dict] = {}
        self.paths: list[str] = []
        self.drawn: dict[str, list[str]] = {}  # the paths, by the id around them
        self.tags: set[str] = set()
        self._id = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        attributes = dict(attributes)
        self._id = attributes.get("id", self._id)
        self.tags.add(tag)
        if "id" in attributes:
            self.attributes[self._id] = attributes
        if tag == "path":
            self.paths.append(attributes["d"])
            self.drawn.setdefault(self._id, []).append(attributes["d"])

    def handle_data(self, data: str) -> None:
        self.texts[self._id] = self.texts.get(self._id, "") + data.strip()


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


needs_chromium = pytest.mark.skipif(chromium() is None, reason="no Chromium is installed")


def drawn(url: str, folder: Path, milliseconds: int = 9000) -> subprocess.CompletedProcess[str]:
    """A page as Chromium has it after some virtual time."""
    command = [chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder}", f"--virtual-time-budget={milliseconds}", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def look(server: LiveServer, folder: Path, *, milliseconds: int = 9000) -> _Page:
    """The status page after some virtual time."""
    done = drawn(f"{server.url}/", folder, milliseconds)
    page = _Page(done.stdout)
    assert "model" in page.texts, done.stderr
    return page


class TestPage:
    def test_it_needs_nothing_from_elsewhere(self, fresh):
        response = fresh.http.get("/")
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert not re.search(r"(src|href)=(?![\"']?data:)|https?://(?!www.w3.org/2000/svg)|@import", response.text)

    def test_forbids_frames_around_it_and_foreign_scripts(self, fresh):
        """SE-3: a page around it could have its visitor click on the reset button without seeing it."""
        headers = fresh.http.get("/").headers
        rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert rules["frame-ancestors"] == rules["default-src"] == "'none'"
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", rules["script-src"])
        assert headers["x-frame-options"] == "DENY"
        assert "innerHTML" not in fresh.http.get("/").text

    @needs_chromium
    @pytest.mark.realtime
    def test_page_draws_the_metrics(self, fresh, tmp_path, monkeypatch):
        """Ten minutes of history that the page has not seen itself; the figures that README promises; failures."""
        fresh.reset_cache()
        history = fresh.serving.history
        take = history.sample
        monkeypatch.setattr(History, "sample", lambda self: None)
        history._samples.clear()
        history._samples.append((time.time() - 570, dict.fromkeys(fresh.serving.metrics.values(), 0)))
        take()
        for _ in range(3):
            complete(fresh, max_tokens=6)
        assert fresh.http.post("/v1/completions", json={"prompt": [1] * 40, "max_tokens": 9999}).status_code == 400
        take()
        page = look(fresh, tmp_path)
        assert page.texts["model"] == "tiny"
        skipped = fresh.metric("prompt_tokens_skipped_total")
        computed = sum(fresh.metric("prompt_tokens_computed_total", reason=reason.value) for reason in Reason)
        assert page.texts["skipped-share"].startswith(f"{100 * skipped / (skipped + computed):.1f}".rstrip("0."))
        requests = sum(fresh.metric("requests_total", outcome=one) for one in ("stop", "length", "aborted", "failed"))
        assert page.texts["requests"].startswith(f"{requests:.0f}")
        (decode,) = page.drawn["decode"]
        heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", decode)]
        assert heights[1] < heights[0] - 10, "tokens came between the last two samples; further down is less"
        assert f"of {fresh.metric('kv_blocks'):.0f}" in page.texts["kv-blocks"]
        assert f"{fresh.metric('kv_blocks_evictable'):.0f}" in page.texts["kv-blocks"]
        assert "every 2 s" in page.texts["state"]
        curves = [path for path in page.paths if path.count("L") >= 2]
        assert len(curves) >= 4, "decode tokens/s, KV blocks in use, KV blocks cached, snapshots"
        starts = [float(re.match(r"M([\d.]+)", path).group(1)) for path in curves]
        assert 60 < min(starts) < 90, "570 of 600 seconds to the left, of 52 to 480"
        geometry = fresh.engine.geometry
        assert f"tokens of a block{geometry.block_size_tokens}" in page.texts["geometry"]
        assert f"can hit{geometry.shortest_prompt_that_can_hit}" in page.texts["geometry"]
        (prefix,) = fresh.http.get("/prefix_cache").json()["hottest_prefixes"]
        assert f"{prefix['digest'][:12]}2 × 32 tokens" in page.texts["hottest"]
        assert "Empty the cache" in page.texts["hottest"]
        assert "hidden" in page.attributes["key"], "there is no key to be asked for"
        failed = fresh.metric("requests_total", outcome="failed")
        assert f"requests failed{failed:.0f}" in page.texts["failures"]


def test_a_fleets_cards_hold_what_is_long():
    """A hash of 32 characters stood over the next card at every width."""
    assert re.search(r"td:last-child \{[^}]*overflow-wrap: anywhere", FLEET_PAGE)
    assert 'told(one.weights, brief(one.weights || "-"))' in FLEET_PAGE
