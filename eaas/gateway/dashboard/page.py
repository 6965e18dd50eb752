"""The page of /dashboard: one document that needs nothing else, with a policy that lets it run only what is in it."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

_PARTS = resources.files("eaas.gateway.dashboard") / "page"


@cache
def dashboard_page() -> tuple[bytes, dict[str, str]]:
    """The document, and the headers that it goes with."""
    style, script = (_read(name) for name in ("dashboard.css", "dashboard.js"))
    page = _read("dashboard.html").replace("/*style*/", style).replace("/*script*/", script)
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'; "
        f"img-src data:; style-src {_source(style)}; script-src {_source(script)}"
    )
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return page.encode(), headers


def _read(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
