# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Modules of deepspeed_ext as modules of a DeepSpeed: other names, DeepSpeed's header, DeepSpeed's format."""

import ast
import functools
import io
import re
import tokenize
from pathlib import PurePosixPath

from deepspeed_ext.integration.fork import PACKAGE
from scripts import ROOT

# What patches DeepSpeed while it runs, what is said there, and what a fork needs no seam for, as its own files have
# the fix.
STAYS = frozenset(
    f"deepspeed_ext/{name}.py"
    for name in (
        "__init__",
        "__main__",
        "integration/activation",
        "integration/fork",
        "integration/patcher",
        "integration/patches",
        "integration/relied_on",
        "integration/seams/upstream_fixes",
        "integration/symbols",
    )
)
MENDED = "deepspeed_ext.integration.seams.upstream_fixes"  # each function has a counterpart among the series' fixes
# Seams of the series without a twin: they change numbers without a key of ours, which is DeepSpeed's to decide.
UPSTREAM = frozenset({("qgz.reduce_to_the_mean", "all_to_all_quant_reduce")})
# Of a fork's package, what has no twin.
BY_HAND = frozenset(f"{PACKAGE.replace('.', '/')}/{name}.py" for name in ("__init__", "__main__"))

_BUILDER = "op_builder/loco.py"
_NAMES = (  # in this order
    ("from deepspeed.ops.op_builder.builder import", "from .builder import"),  # that package has two names
    ("deepspeed_ext.op_builder", "deepspeed.ops.op_builder.loco"),
    ("deepspeed_ext/", f"{PACKAGE.replace('.', '/')}/"),
    ("deepspeed_ext", PACKAGE),
)
_KEPT = "deepspeed_ext contributors"
_HEADER = re.compile(
    r"\A((?:#|//) )Copyright \(c\) deepspeed_ext contributors\n\1SPDX-License-Identifier: Apache-2.0\n"
)
_STYLE = "{based_on_style: pep8, column_limit: 119, split_penalty_after_opening_bracket: 600}"


def sources() -> list[str]:
    """Return all that a fork has of ours, relative to the repository."""
    modules = [path.relative_to(ROOT).as_posix() for path in (ROOT / "deepspeed_ext").rglob("*.py")]
    data = [*(ROOT / "csrc" / "loco").iterdir(), *(ROOT / "deepspeed_ext" / "report" / "assets").iterdir()]
    return sorted(
        [name for name in modules if name not in STAYS] + [path.relative_to(ROOT).as_posix() for path in data]
    )


def target(source: str) -> str:
    """Return where a fork has it, relative to its root."""
    if source == "deepspeed_ext/op_builder.py":
        return _BUILDER
    path = PurePosixPath(source)
    if path.parts[0] == "csrc":
        return source
    return str(PurePosixPath(*PACKAGE.split("."), *path.parts[1:]))


def translated(source: str, formatted: bool = True) -> str:
    """Return the text that a fork has of it; formatting takes half a minute for all."""
    text = (ROOT / source).read_text(encoding="utf-8")
    text = _HEADER.sub(lambda found: f"{found[0]}\n{found[1]}DeepSpeed Team\n", text)
    head, kept, rest = text.partition(_KEPT)
    for ours, theirs in _NAMES:
        rest = rest.replace(ours, theirs)
    text = head + kept + rest
    return _formatted(text) if formatted and source.endswith(".py") else text


def says_the_same(one: str, other: str) -> bool:
    """Whether two texts of Python differ in their format only."""
    return _tokens(one) == _tokens(other) and ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))


def _tokens(text: str) -> list[str]:
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in found if token.type not in layout]


@functools.cache  # a check compares each more than once
def _formatted(text: str) -> str:
    from yapf.yapflib.yapf_api import FormatCode  # not where a fork is only built

    formatted: str = FormatCode(text, style_config=_STYLE)[0]
    return formatted


def is_ours(name: str) -> bool:
    """Whether a file of a fork, relative to its root, is there because of ours, or was."""
    generated = name.startswith((f"{PACKAGE.replace('.', '/')}/", "csrc/loco/")) or name == _BUILDER
    return generated and name not in BY_HAND
