"""The status page: one file, and headers that keep it what it is."""

from __future__ import annotations

import base64
import re
from hashlib import sha256
from importlib.resources import files

PAGE = (files("megatron_ext.server") / "status.html").read_text(encoding="utf-8")


def _script_digest(page: str) -> str:
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    return base64.b64encode(sha256(script.encode()).digest()).decode()


# Only its own script runs, whatever is written into the page; it asks nobody but this server, and stands in no frame,
# in which a page around it could have its visitor click on what he does not see.
PAGE_HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            f"script-src 'sha256-{_script_digest(PAGE)}'",
            "style-src 'unsafe-inline'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
