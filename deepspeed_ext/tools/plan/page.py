# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A calculator of strategies as one HTML page, which needs no installation or network. Pure.

``assets/calculator.js`` repeats the planner's closed form, with the names of the Python code. The style sheet and
``dom.js`` are shared with reports.
"""

from pathlib import Path

from deepspeed_ext.strategy import STRATEGIES
from deepspeed_ext.tools.html_page import fill_template, read_asset
from deepspeed_ext.version import __version__

_ASSETS = Path(__file__).with_name("assets")
_SCRIPTS = ("calculator.js", "curve.js", "main.js")  # in their order, after dom.js


def render() -> str:
    """Return the page."""
    rows = {name: {"stage": row.stage, "known_as": row.known_as} for name, row in STRATEGIES.items()}
    return fill_template(
        _text("page.html"),
        "Which ZeRO strategy: a calculator",
        read_asset("page.css") + _text("calculator.css"),
        "\n".join([read_asset("dom.js"), *map(_text, _SCRIPTS)]),
        rows,
        version=__version__,
    )


def _text(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
