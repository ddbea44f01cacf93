# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML page, which needs neither a network nor a server. Pure.

The page consists of ``assets``: a template, a style sheet, and scripts, which draw the report that the page carries as
JSON. The title and the verdict are in the page itself, for readers without scripts.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

_ASSETS = Path(__file__).with_name("assets")
_SCRIPTS = (
    "dom.js",
    "bars.js",
    "spans.js",
    "view.js",
    "timeline.js",
    "tables.js",
    "ranks.js",
    "main.js",
)  # in their order


def render(report: Mapping[str, Any]) -> str:
    """Return a page that shows the report.

    Numbers that are not finite are left out, like those that are None.

    Args:
        report: the contents of ``report.json``.

    Raises:
        TypeError: the report has something that JSON has not.
    """
    training = report.get("training") or {}
    called = html.escape(str(training.get("called") or "training"))
    return fill_template(
        read_asset("page.html"),
        read_asset("page.css"),
        "\n".join(map(read_asset, _SCRIPTS)),
        report,
        title=f"Where a step goes: {called}",
        called=called,
        verdict=html.escape(str(report.get("paragraph") or "")),
    )


def fill_template(template: str, style: str, script: str, data: Mapping[str, Any], **texts: str) -> str:
    """Return a page that loads nothing, with its style sheet, its script, and its data as JSON.

    Args:
        template: HTML with ``$policy``, ``$style``, ``$script``, ``$data``, and the names of ``texts``.
        style, script: CSS and JavaScript.
        data: what the script reads.
        texts: HTML.
    """
    return Template(template).substitute(
        policy=_policy(style, script), style=style, script=script, data=_embedded(data), **texts
    )


def read_asset(name: str) -> str:
    """Return a file of the page's; other pages share the style sheet and ``dom.js``."""
    return (_ASSETS / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Return a Content-Security-Policy: nothing is loaded, and nothing runs but this style and this script."""
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        f"base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(report: Mapping[str, Any]) -> str:
    """Return the report as JSON that no HTML parser takes for a tag, an end of the script, or a comment."""
    text = json.dumps(_finite(report), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    """Return the value with None in the place of numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
