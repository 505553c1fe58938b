"""A report of an exploration: the page's view and its data in one HTML file, which loads nothing."""

from __future__ import annotations

import base64
import html
import json
import re
from string import Template
from typing import Any

from bexp.api.web.assets import read_assets

MODULE = re.compile(r'(?<=from )"\./([\w-]+\.js)"')


def render_report(exploration: dict[str, Any], trials: list[dict[str, Any]], events: list[dict[str, Any]]) -> str:
    """Return the HTML of a report.

    The arguments are JSON documents of the REST API: one exploration, all of its trials, and all of its events.
    """
    data = {"exploration": exploration, "trials": trials, "events": events}
    return Template(_text("report.html")).substitute(
        title=html.escape(f"{exploration['model']}: report of bexp"),
        style=_text("style.css"),
        imports=json.dumps({"imports": _modules("report.js")}),
        # A `<` could end the element, or open a comment within it.
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    )


def _modules(entry: str) -> dict[str, str]:
    """Return `entry` and what it imports, as data URLs by name: a module of such a URL has no folder to import from."""
    urls: dict[str, str] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name in urls:
            continue
        source = _text(name)
        waiting += MODULE.findall(source)
        encoded = base64.b64encode(MODULE.sub(r'"\1"', source).encode()).decode()
        urls[name] = f"data:text/javascript;base64,{encoded}"
    return urls


def _text(name: str) -> str:
    return read_assets()[name].body.decode()
