# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The report on another DeepSpeed: of small packages that stand for ours, for the one that we know, and it."""

import argparse
import ast
import json
from pathlib import Path

import pytest

from deepspeed_ext.integration.patches import PATCHES
from deepspeed_ext.integration.symbols import Patch
from scripts import ROOT
from scripts.fork import drift, series, usage
from scripts.fork.deepspeed_source import Failed, git
from scripts.fork.drift_report import Difference, as_text
from scripts.fork.source_tree import SourceTree, signature

OURS = {
    "adapter.py": '''"""Strategies: what the tests call so."""
from deepspeed.runtime import tools
from deepspeed.runtime.tools import LIMIT, extended, helper
from deepspeed.runtime.zero import Optimizer
from typing_extensions import override
from deepspeed_ext.overrides import checked

@checked
class Ours(Optimizer):
    """An optimizer of ours. More."""
    shard: list[int]

    @override
    def step(self, closure=None):
        """Step; and more."""
        return helper(self.shard, LIMIT) + extended(1)

    @tools.lazy
    def own(self): ...
''',
    "late.py": '"""Late imports."""\nimport deepspeed.runtime.driver\nfrom deepspeed.runtime.parsed import name\n',
    "overrides.py": "def checked(cls): return cls\n",
}
KNOWN = {
    "runtime/zero.py": """from .base import Base
class Optimizer(Base):
    def step(self, closure=None): ...
    def reduce(self, grads): ...
""",
    "runtime/base.py": "class Base:\n    def __init__(self):\n        self.shard = []\n",
    "runtime/tools.py": """from ._tools import *
LIMIT = 4
def lazy(function): return function
def extended(one): ...
""",
    "runtime/_tools.py": "def helper(one, two=2): ...\n",
    "runtime/driver.py": "",
    "runtime/parsed.py": "name = 1\n",
}
CHANGED = KNOWN | {
    "runtime/zero.py": """from .base import Base
class Optimizer(Base):
    def step(self, closure=None, *, scale): ...
    def reduce(self, grads, group): ...
    def own(self): ...
""",
    "runtime/base.py": "class Base:\n    def __init__(self):\n        self.shards = []\n",
    "runtime/tools.py": "from ._tools import *\nLIMIT = 8\ndef extended(one, two=None): ...\n",
    "runtime/_tools.py": "def helper(one, *, two=2): ...\n",
    "runtime/driver.py": "raise RuntimeError('no driver')\n",
    "runtime/parsed.py": "name = (\n",
}
ROWS = (Patch("deepspeed.runtime.zero:Optimizer.reduce", "reduce gradients", "(self, grads)"),)
ADAPTER, LATE = ("deepspeed_ext.adapter",), ("deepspeed_ext.late",)
RELIED_ON, STEP = ("deepspeed_ext.integration.relied_on",), "(self, closure=None)"
STRATEGIES, ZERO, TOOLS = (
    "Strategies: what the tests call so",
    "deepspeed.runtime.zero.Optimizer",
    "deepspeed.runtime.tools",
)
EXPECTED = [
    Difference(f"{TOOLS}.LIMIT", "value", "4", "8", ADAPTER, STRATEGIES),
    Difference(f"{TOOLS}.helper", "arguments", "(one, two=2)", "(one, *, two=2)", ADAPTER, STRATEGIES),
    Difference(f"{TOOLS}.lazy", "missing", "(function)", "gone", ADAPTER, STRATEGIES),
    Difference(f"{ZERO}.own", "new", "nothing of that name", "a method", ADAPTER, "override it"),
    Difference(f"{ZERO}.reduce", "arguments", "(self, grads)", "(self, grads, group)", RELIED_ON, "reduce gradients"),
    Difference(f"{ZERO}.shard", "missing", "a value", "gone", ADAPTER, "An optimizer of ours"),
    Difference(
        f"{ZERO}.step", "arguments", f"{STEP}, ours takes {STEP}", "(self, closure=None, *, scale)", ADAPTER, "step"
    ),
    Difference(f"{TOOLS}.extended", "arguments", "(one)", "(one, two=None)", ADAPTER, STRATEGIES, matters=False),
]


def package(folder: Path, name: str, files: dict[str, str]) -> Path:
    """Write a package, with an ``__init__.py`` in each folder."""
    for file, text in files.items():
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        for above in (path.parent, folder / name):
            (above / "__init__.py").touch()
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with all three, which the command compares."""
    package(tmp_path / "ours", "deepspeed_ext", OURS)
    known = package(tmp_path / "known", "deepspeed", KNOWN)
    package(tmp_path / "changed", "deepspeed", CHANGED)
    monkeypatch.setattr(series, "ROOT", tmp_path / "ours")
    monkeypatch.setattr(series, "PATCHES", ROWS)
    monkeypatch.setattr(drift, "known_tree", lambda _: SourceTree(known, "deepspeed"))
    return tmp_path


def run(*of: object, **options: object) -> int:
    chosen = {"json": False, "markdown": False, "no_import": True, "output": None, **options}
    return series.drift(argparse.Namespace(of=[str(one) for one in of], **chosen))


@pytest.mark.quick
def test_each_difference_is_told_with_what_breaks(small: Path, tmp_path: Path) -> None:
    """None of them ends the report: neither a file that cannot be read nor modules that cannot be imported."""
    ours, known = SourceTree(small / "ours", "deepspeed_ext"), SourceTree(small / "known", "deepspeed")
    (tmp_path / "scratch").mkdir()
    found = drift.report(str(small / "changed"), known, ours, ROWS, tmp_path / "scratch", do_import=True)
    imports = [one for one in found.differences if one.what == "import"]
    (unread,) = [one for one in found.differences if "cannot be read" in one.found]
    assert [one for one in found.differences if one not in (*imports, unread)] == EXPECTED
    assert found.breaking == len(found.differences) - 1 and not found.notes
    assert (unread.symbol, unread.breaks) == ("deepspeed.runtime.parsed.name", LATE)
    assert unread.found.startswith("deepspeed.runtime.parsed cannot be read: SyntaxError: ")
    errors = {one.breaks: one.symbol for one in imports}
    assert errors.pop(LATE) == "RuntimeError: no driver (deepspeed/runtime/driver.py, line 1)"
    said = f"AttributeError: module '{TOOLS}' has no attribute 'lazy' (deepspeed_ext/adapter.py, line 18)"
    assert errors == {ADAPTER: said}
    text = as_text([found])
    assert f"  missing   {ZERO}.shard\n            known: a value\n            there: gone\n" in text
    assert "breaks adapter: An optimizer of ours" in text


@pytest.mark.quick
@pytest.mark.parametrize(
    ("now", "taken"),
    [
        ("one, two, three=3, *, key", True),
        ("one, two, three=3, four=4, *, key, more=5", True),
        ("one, two, three=3, *others, key, **names", True),
        ("two, one, three=3, *, key", False),
        ("one, two, three=4, *, key", False),
        ("one, two, three, *, key", False),
        ("one, two, *, three=3, key", False),
        ("one, two, three=3, *, key, more", False),
        ("one, two, three=3", False),
    ],
)
def test_a_function_that_takes_more_breaks_nothing(now: str, taken: bool) -> None:
    functions = [ast.parse(f"def f({given}): ...").body[0] for given in (now, "one, two, three=3, *, key")]
    assert drift.takes(*(signature(one) for one in functions if isinstance(one, ast.FunctionDef))) is taken


@pytest.mark.quick
def test_the_status_says_whether_something_breaks(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fits = package(small / "fits", "deepspeed", KNOWN | {"runtime/parsed.py": "name = other()\n"})
    assert run(fits) == 0
    assert run(fits, small / "changed", json=True) == 1
    printed = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert [one["breaking"] for one in printed["reports"]] == [0, 8] and printed["supported"]
    assert run(small / "ours", "newest", small / "changed", markdown=True) == 2
    out, err = capsys.readouterr()
    assert (
        out.startswith("## DeepSpeed of unknown version\n") and f"| value | `{TOOLS}.LIMIT` | 4 | 8 | adapter |" in out
    )
    assert "has no deepspeed/__init__.py, and is no git directory" in err
    assert "expected a version of DeepSpeed, a folder with its source or a git directory, got newest" in err


@pytest.mark.quick
def test_a_git_directory_is_taken_at_its_head(small: Path, tmp_path: Path) -> None:
    tree = small / "changed"
    (tree / "version.txt").write_text("9.9\n")
    git(tree, "init", "--quiet")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "all", date="2026-11-26T00:00:00Z")
    commit = git(tree, "rev-parse", "--short", "HEAD").strip()
    (tmp_path / "scratch").mkdir()
    label, root = drift.opened(str(tree / ".git"), tmp_path / "scratch")
    assert label == f"DeepSpeed 9.9, commit {commit} of 2026-11-26"
    assert (root / "deepspeed/runtime/zero.py").read_text() == CHANGED["runtime/zero.py"]
    assert drift.opened(str(tree), tmp_path)[0] == label
    git(tree, "rm", "--quiet", "-r", "deepspeed")
    git(tree, "commit", "--quiet", "--message", "none")
    with pytest.raises(Failed, match="has no folder deepspeed"):
        drift.opened(str(tree / ".git"), tmp_path / "none")


def test_each_protocol_is_compared(tmp_path: Path) -> None:
    """With DeepSpeed's class that it describes, of which all but our own keys are found; imports and rows as well."""
    known = drift.known_tree(tmp_path)
    text = (ROOT / "deepspeed_ext" / "deepspeed_types.py").read_text(encoding="utf-8")
    assert {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)} == set(usage.PROTOCOLS)
    used = usage.uses(SourceTree(ROOT, "deepspeed_ext"), known, PATCHES)
    targets = {use.target for use in used}
    assert {patch.target for patch in PATCHES} <= targets and "deepspeed.runtime.compiler:lazy_disable" in targets
    for of in usage.PROTOCOLS.values():
        assert any(target.startswith(f"{one}.") for one in of for target in targets), of
    assert not [use.target for use in used if known.look_up(use.target) is None and not use.is_new]
