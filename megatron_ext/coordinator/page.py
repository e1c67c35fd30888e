"""The status page: one file, with the headers that keep it what it is."""

from __future__ import annotations

from importlib.resources import files

from megatron_ext.server.http.status_page import page_headers

PAGE = (files("megatron_ext.coordinator") / "status.html").read_text(encoding="utf-8")
PAGE_HEADERS = page_headers(PAGE)
