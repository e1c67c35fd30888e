"""Swagger UI of the OpenAPI description, with files of the package fastapi-offline: a browser loads nothing else."""

from __future__ import annotations

from pathlib import Path

import fastapi_offline
from fastapi.openapi.docs import get_swagger_ui_html

from megatron_ext.server.http.status_page import page_headers

ASSETS = Path(fastapi_offline.__file__).parent / "static"
SCRIPT, SHEET = "swagger-ui-bundle.js", "swagger-ui.css"
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
DOCS_HEADERS = page_headers(DOCS_PAGE, own_files=True)
