"""Pages: the status of a server and of a fleet, the OpenAPI description, and the headers that restrict them."""

from __future__ import annotations

import base64
import re
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import fastapi_offline
from fastapi.openapi.docs import get_swagger_ui_html

ASSETS = Path(fastapi_offline.__file__).parent / "static"
SCRIPT, SHEET = "swagger-ui-bundle.js", "swagger-ui.css"
# Swagger UI with files of the package fastapi-offline: a browser loads nothing else.
# Addresses are relative to /docs, so that a prefix of a proxy is kept.
DOCS_PAGE = bytes(
    get_swagger_ui_html(
        openapi_url="openapi.json",
        title="megatron_ext",
        swagger_js_url=f"docs/{SCRIPT}",
        swagger_css_url=f"docs/{SHEET}",
        swagger_favicon_url="data:,",
    ).body
).decode()


def _read(name: str) -> str:
    return (files("megatron_ext.server") / name).read_text(encoding="utf-8")


STYLE = _read("page.css")
"""Style that all pages share: colours for light and dark, and the outline of the focus."""

PAGE, FLEET_PAGE = (_read(name).replace("  /* page.css */\n", STYLE) for name in ("status.html", "fleet.html"))
"""Pages of a server, and of a fleet (`/replicas`)."""


def page_headers(page: str, *, own_files: bool = False) -> dict[str, str]:
    """Return the security headers of a page.

    Only the page's own script runs, whatever is injected into the page. The page connects to this server only, and
    cannot be framed, since a surrounding page could make its visitor click on hidden controls.

    Args:
        page: The page, with one script.
        own_files: Whether scripts and styles may also be files of this server.
    """
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(sha256(script.encode()).digest()).decode()
    files_too = " 'self'" if own_files else ""
    rules = (
        "default-src 'none'",
        f"script-src 'sha256-{digest}'{files_too}",
        f"style-src 'unsafe-inline'{files_too}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return {
        "Content-Security-Policy": "; ".join(rules),
        "X-Frame-Options": "DENY",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


PAGE_HEADERS = page_headers(PAGE)
FLEET_PAGE_HEADERS = page_headers(FLEET_PAGE)


DOCS_HEADERS = page_headers(DOCS_PAGE, own_files=True)
