"""The pages' colours, sizes and controls: the status page, that of a fleet, and the description of the API."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.server.http.status_page import FLEET_PAGE, FLEET_PAGE_HEADERS, PAGE, STYLE
from tests.on_request import long_except
from tests.unit_tests.server.test_observing import _Page, chromium, needs_chromium
from tests.unit_tests.support.server import LiveServer, tiny_engine

BEHIND = ("--ground", "--card")
LEAST_CONTRAST = 4.5
SCHEMES = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)


def colours(scheme: str) -> dict[str, str]:
    return dict(re.findall(r"(--[a-z]+): (#[0-9a-f]+);", scheme))


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour, by the formula of WCAG 2."""
    digits = colour[1:]
    if len(digits) == 3:
        digits = "".join(digit * 2 for digit in digits)
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_formula():
    """Values of WCAG's own examples: black on white, and the lightest grey that is readable on white."""
    assert contrast("#000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#fff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("scheme", SCHEMES, ids=["light", "dark"])
def test_contrast(scheme):
    """All colours of text, links, curves and bars on both backgrounds; borders are only ornament."""
    known = colours(scheme)
    shown = known.keys() - {*BEHIND, "--line"}
    assert shown == {"--text", "--faint", "--blue", "--green", "--amber", "--grey", "--red"}
    for name, behind in itertools.product(sorted(shown), BEHIND):
        assert contrast(known[name], known[behind]) >= LEAST_CONTRAST, (name, behind)


def test_usual_names_of_quantiles():
    assert "p95" in PAGE
    assert "95 of 100" not in PAGE


@pytest.mark.parametrize("page", [PAGE, FLEET_PAGE], ids=["server", "fleet"])
def test_all_pages(page):
    """Pages have the common colours and no others, fit small screens, and show what has the focus."""
    style = page.split("<style>")[1].split("</style>")[0]
    assert re.findall(r"#[0-9a-f]{3,6}\b", style.replace(STYLE, "")) == []
    assert re.findall(r"#[0-9a-f]{3,6}\b", page.split("</style>")[1]) == []
    assert ":focus-visible" in style
    assert "a { color: var(--blue); }" in style
    assert re.search(r"<meta name=\"?viewport", page)


def test_a_fleets_cards_hold_what_is_long():
    """A hash of 32 characters stood over the next card at every width."""
    assert re.search(r"td:last-child \{[^}]*overflow-wrap: anywhere", FLEET_PAGE)
    assert 'told(one.weights, brief(one.weights || "-"))' in FLEET_PAGE


# A person reads a chart with the keys, then with the pointer, and leaves it.
READER = """<script>
const until = async test => { while (!test()) await new Promise(done => setTimeout(done, 50)); };
(async () => {
  await until(() => document.getElementById("state").className === "ok");
  const card = document.getElementById("kv-blocks"), svg = card.querySelector("svg");
  svg.id = "chart";
  const note = name => svg.setAttribute(name, card.querySelector(".now").textContent);
  const press = key => svg.dispatchEvent(new KeyboardEvent("keydown", {key, cancelable: true}));
  svg.focus();
  svg.setAttribute("focused", String(document.activeElement === svg));
  note("latest");
  press("Home"); note("first");
  press("ArrowRight"); note("second");
  press("Escape"); note("left");
  const box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width * 0.12, clientY: box.top + 9}));
  note("pointed");
  svg.dispatchEvent(new PointerEvent("pointerleave"));
  note("gone");
  const columns = id => getComputedStyle(document.getElementById(id)).gridTemplateColumns.split(" ").length;
  const shown = id => [...document.getElementById(id).children].filter(one => !one.hidden);
  const cells = shown("charts").reduce((sum, one) => sum + (one.classList.contains("wide") ? columns("charts") : 1), 0);
  document.body.setAttribute("tiles", `${shown("tiles").length} ${columns("tiles")}`);
  document.body.setAttribute("cards", `${cells} ${columns("charts")}`);
  document.body.setAttribute("overflow", document.documentElement.scrollWidth - innerWidth);
  document.body.setAttribute("drafts", String(document.getElementById("drafts").hidden));
  const scales = [scale({}, [0.9, 0.92]), scale({}, [1, 9]), scale({stacked: true}, [90, 92]), scale({top: 3}, [])];
  scales.push(scale({unit: count, stacked: true}, [0, 1]), scale({unit: count, stacked: true}, [3, 5]));
  document.body.setAttribute("scales", JSON.stringify(scales));
  document.body.setAttribute("axis", [...svg.querySelectorAll("text")].map(one => one.textContent).join("|"));
  document.body.setAttribute("uptime", document.getElementById("uptime").textContent);
  document.body.id = "body";
})();
</script>"""


@pytest.fixture(scope="module")
def reading(serve) -> LiveServer:
    """Server with a history of ten minutes in which blocks were cached, and no more samples after that."""
    server = serve(tiny_engine())
    history = server.serving.history
    values = server.serving.metrics.values()
    now = server.serving.created
    history._samples.clear()
    for age, cached in ((550, 0), (300, 7), (60, 40)):
        history._samples.append((now - age, values | {"kv_blocks_evictable": cached}))
    return server


def read_page(server: LiveServer, folder: Path, width: int) -> _Page:
    """Return the page after some virtual time, in a window of this width."""
    command = [chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder}", f"--window-size={width},900", "--virtual-time-budget=9000"]
    done = subprocess.run(
        [*command, "--dump-dom", f"{server.url}/"], capture_output=True, text=True, timeout=120, check=False
    )
    page = _Page(done.stdout)
    assert "body" in page.attributes, done.stderr
    return page


@needs_chromium
@pytest.mark.parametrize(("width", "columns"), long_except([(400, (2, 1))], [(400, (2, 1)), (1400, (4, 2))]))
def test_values_by_keys_and_pointer_and_the_grid(reading, tmp_path, monkeypatch, width, columns):
    """Each sample's values are shown by arrow keys and under the pointer; no row of the grid has a hole."""
    monkeypatch.setattr("megatron_ext.server.routes.observing.PAGE", PAGE.replace("</body>", f"{READER}</body>"))
    monkeypatch.setattr("megatron_ext.server.routes.observing.PAGE_HEADERS", {})
    page = read_page(reading, tmp_path, width)
    seen, body = page.attributes["chart"], page.attributes["body"]
    assert seen["focused"] == "true"
    assert seen["first"].endswith(": 0 + 0 of 200")
    assert seen["second"].endswith(": 0 + 7 of 200")
    assert seen["latest"] == seen["left"] == seen["gone"]
    assert seen["latest"].endswith(" of 200")
    assert seen["pointed"].endswith(": 0 + 0 of 200"), "at the left end is the oldest sample"
    tiles, tile_columns = map(int, body["tiles"].split())
    cells, card_columns = map(int, body["cards"].split())
    assert (tile_columns, card_columns) == columns
    assert tiles % tile_columns == cells % card_columns == 0
    assert int(body["overflow"]) <= 0
    assert body["axis"].startswith("0|25|50|"), "the highest is 40, of 200"
    near, wide, area, empty, one, five = json.loads(body["scales"])
    assert (one, five) == ([0, 2], [0, 6]), "half of the highest count is a count"
    assert 0.8 <= near[0] <= 0.9 < 0.92 <= near[1] <= 1, "a small change is seen"
    assert (wide, area, empty) == ([0, 10], [0, 100], [0, 3])
    assert re.fullmatch(r"\d+ (s|min)", body["uptime"])
    assert body["drafts"] == "true", "the server does not speculate"


class FleetOfOne(BaseHTTPRequestHandler):
    """Server of the page of a fleet, and of its data: one replica."""

    row = SimpleNamespace(
        **{"replica": "a1", "node": "10.0.0.1", "status": "ok", "problem": ""},
        **{"model": "tiny", "weights": "0123456789abcdef" * 2},
        **{"in_flight": 0, "waiting": 0, "load_tokens": 0, "skipped": 5, "computed": 7, "hits": 1, "errors": 0},
        **{"blocks": 200, "blocks_cached": 20, "states": 3, "state_slots": 64},
    )

    def do_GET(self) -> None:  # the name that http.server calls
        is_page = self.path == "/"
        content = FLEET_PAGE if is_page else json.dumps({"version": "1", "replicas": [vars(self.row)]})
        self.send_response(200)
        for name, value in (FLEET_PAGE_HEADERS if is_page else {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/html; charset=utf-8" if is_page else "application/json")
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@needs_chromium
def test_a_fleets_bar_is_the_skipped_share(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), FleetOfOne) as fleet:
        threading.Thread(target=fleet.serve_forever).start()
        command = [chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=3000", "--dump-dom"]
        url = f"http://127.0.0.1:{fleet.server_port}/"
        done = subprocess.run([*command, url], capture_output=True, text=True, timeout=120, check=False)
        fleet.shutdown()
    row, text = FleetOfOne.row, done.stdout
    assert f'<span class="hash" title="{row.weights}">{row.weights[:12]}</span>' in text, "a hash is cut"
    share = 100 * row.skipped / (row.skipped + row.computed)
    assert f"({share:.1f} %)" in text
    assert float(re.search(r'class="bar"><div style="width: ([0-9.]+)%', text).group(1)) == pytest.approx(
        share, abs=0.1
    )
