# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Waits of ours that are left out, one at a time: the checker of stream order must find each. A site is a call in the
package that orders streams, or has the host wait. All of them are found in its sources."""

import ast
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

_ORDERING = ("wait_stream", "wait_event", "wait", "record", "record_event", "record_stream", "synchronize")
# Ours that do.
_OURS = {"drain", "finish", "complete", "finish_buckets", "complete_before_exit"}
_OURS |= {"wait_for_current", "wait_for_updates"}

Site = tuple[str, int, int]  # a file, and the first and last line of a call in it


@functools.cache
def sites() -> dict[str, Site]:
    """Return the calls of the package that order something, by file, function, called name, and the number of such a
    call in the function, if not the first: "zero/streams.py:ReductionStream.after_current:wait_stream 2"."""
    package = Path(find_spec("deepspeed_ext").origin).parent  # type: ignore[arg-type, union-attr]
    results: dict[str, Site] = {}
    for path in sorted(package.rglob("*.py")):
        observed: Counter[str] = Counter()
        for function, call, attribute in _ordering_calls(ast.parse(path.read_text()), ""):
            name = f"{path.relative_to(package)}:{function}:{attribute}"
            observed[name] += 1
            name += f" {observed[name]}" if observed[name] > 1 else ""
            results[name] = str(path), call.lineno, call.end_lineno or call.lineno
    return results


def _ordering_calls(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from _ordering_calls(child, f"{function}.{child.name}" if function else child.name)
            continue
        match child:
            case ast.Call(func=ast.Attribute(attr=name)) if name in (*_ORDERING, *_OURS):
                yield function, child, name
        yield from _ordering_calls(child, function)


def under(site: Site) -> Callable[[], bool]:
    """Return a function that tells whether the current call is at a site, or inside of it."""

    path, first, last = site

    def is_under() -> bool:
        frame = sys._getframe(1)
        while frame is not None:
            if first <= frame.f_lineno <= last and frame.f_code.co_filename == path:
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    return is_under
