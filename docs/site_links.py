"""For `make docs`: what a page says of files outside docs/ stays as text, for the site does not hold them.

tests/test_docs.py sees to it that those files are there.
"""

from __future__ import annotations

import re
from typing import Any

# [text](../path), but no picture.
OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def as_text(link: re.Match[str]) -> str:
    """The link's text, and the path behind it where the text does not say it."""
    text, path = link[1], link[2]
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs: the source of a page before it is read."""
    return OUTSIDE.sub(as_text, markdown)
