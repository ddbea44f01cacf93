# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""HTML pages that need no network or server: a template, a style sheet, scripts, and data as JSON. Pure."""

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

_ASSETS = Path(__file__).parent / "report" / "assets"


def fill_template(template: str, title: str, style: str, script: str, data: Mapping[str, Any], **texts: str) -> str:
    """Return a self-contained page, with its style sheet, its script, and its data as JSON.

    Args:
        template: HTML with ``$head``, ``$script``, ``$data``, and the names of ``texts``.
        title: title of the page, as HTML.
        style, script: CSS and JavaScript.
        data: data for the script.
        texts: HTML by name.
    """
    policy = (  # load nothing, and allow only this style and this script
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        f"base-uri 'none'; form-action 'none'"
    )
    head = Template(read_asset("head.html")).substitute(policy=policy, title=title, style=style)
    return Template(template).substitute(head=head, script=script, data=_embed_json(data), **texts)


def read_asset(name: str) -> str:
    """Return an asset of the report; all pages share the head, the style sheet, and ``dom.js``."""
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embed_json(data: Mapping[str, Any]) -> str:
    """Return the data as JSON without characters that an HTML parser could read as a tag or a comment."""
    text = json.dumps(_without_infinity(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _without_infinity(value: Any) -> Any:
    """Return the value with None for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _without_infinity(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
