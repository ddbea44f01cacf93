# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The report on another DeepSpeed: of small packages in the place of this one, the DeepSpeed we know, and another."""

import ast
import inspect
import shutil
from pathlib import Path

import pytest

from deepspeed_ext.integration.patches import PATCHES
from deepspeed_ext.integration.symbols import Patch
from scripts import ROOT
from scripts.fork import drift, usage
from scripts.fork.deepspeed_source import Failed, git, requirement

OURS = '''"""Strategies: what the tests call so."""
from deepspeed import zero
from deepspeed.zero import LIMIT, Optimizer, extended, helper
from typing_extensions import override

class Ours(Optimizer):
    """An optimizer of ours. More."""
    @override
    def step(self, closure=None):
        """Step; and more."""
        return helper(self.shard, LIMIT) + extended(1)

    @zero.lazy
    def own(self): ...
'''
KNOWN = """LIMIT = 4
def helper(one, two=2): ...
def lazy(function): return function
def extended(one): ...
class Base:
    def __init__(self): self.shard = []
class Optimizer(Base):
    def step(self, closure=None): ...
    def reduce(self, grads): ...
"""
CHANGED = """LIMIT = 8
def helper(one, *, two=2): ...
def extended(one, two=None): ...
class Base:
    def __init__(self): self.shards = []
class Optimizer(Base):
    def step(self, closure=None, *, scale): ...
    def reduce(self, grads, group): ...
    def own(self): ...
"""
ROWS = (Patch("deepspeed.zero:Optimizer.reduce", "reduce gradients", "(self, grads)"),)
REPORT = """DeepSpeed of unknown version: 10 differences break something, 1 break nothing; 11 symbols are used
  import    AttributeError: module 'deepspeed.zero' has no attribute 'lazy' (deepspeed_ext/adapter.py, line 13)
  import    RuntimeError: no driver (deepspeed/driver.py, line 1)
  missing   deepspeed.driver: a module -> deepspeed.driver cannot be imported: RuntimeError: no driver
  value     deepspeed.zero.LIMIT: 4 -> 8
  new       deepspeed.zero.Optimizer.own: nothing of that name -> (self)
  arguments deepspeed.zero.Optimizer.reduce: (self, grads) -> (self, grads, group)
  missing   deepspeed.zero.Optimizer.shard: a value -> gone
  arguments deepspeed.zero.Optimizer.step: (self, closure=None), ours takes (self, closure=None) -> \
(self, closure=None, *, scale)
  arguments deepspeed.zero.helper: (one, two=2) -> (one, *, two=2)
  missing   deepspeed.zero.lazy: (function) -> gone
  arguments deepspeed.zero.extended: (one) -> (one, two=None)"""


def package(folder: Path, name: str, **modules: str) -> Path:
    """Write a package of modules."""
    (folder / name).mkdir(parents=True)
    for module, text in {"__init__": "", **modules}.items():
        (folder / name / f"{module}.py").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.quick
def test_each_difference_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module that cannot be imported does not end the report; the status is whether something breaks."""
    ours = package(tmp_path / "ours", "deepspeed_ext", adapter=OURS, late='"""Late."""\nimport deepspeed.driver\n')
    shutil.copy(ROOT / "deepspeed_ext" / "overrides.py", ours / "deepspeed_ext")
    known = package(tmp_path / "known", "deepspeed", zero=KNOWN, driver="")
    changed = package(tmp_path / "changed", "deepspeed", zero=CHANGED, driver="raise RuntimeError('no driver')")
    monkeypatch.setattr(drift, "known", lambda _: known)
    assert drift.main([str(known)], False, None, ROWS, ours) == 0
    assert "0 differences break something; 11 symbols are used" in capsys.readouterr().out
    assert drift.main([str(changed)], False, None, ROWS, ours) == 1
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert "            breaks adapter: An optimizer of ours" in lines
    shown = "\n".join(line for line in lines if not line.startswith("            ") or "-> " in line)
    assert shown == REPORT
    assert drift.main([str(changed), "newest", str(ours)], True, tmp_path / "page.md", ROWS, ours) == 2
    err = capsys.readouterr().err
    assert "or a git directory, got newest" in err and "has no deepspeed/__init__.py, and is no git directory" in err
    row = "| value | `deepspeed.zero.LIMIT` | 4 | 8 | adapter | Strategies: what the tests call so |"
    assert row in (tmp_path / "page.md").read_text()


@pytest.mark.quick
def test_a_function_that_accepts_the_same_calls_breaks_nothing() -> None:
    same = ["one, two, three=3, *, key", "one, two, three=3, four=4, *, key, more=5"]
    same += ["one, two, three=3, *others, key, **names"]
    other = ["two, one, three=3, *, key", "one, two, three=4, *, key", "one, two, three, *, key"]
    other += ["one, two, *, three=3, key", "one, two, three=3, *, key, more", "one, two, three=3"]
    signatures = {names: inspect.signature(eval(f"lambda {names}: None")) for names in (*same, *other)}
    assert [names for names in signatures if drift.takes(signatures[names], signatures[same[0]])] == same


@pytest.mark.quick
def test_a_git_directory_is_read_at_its_head(tmp_path: Path) -> None:
    tree = package(tmp_path / "tree", "deepspeed", zero=KNOWN)
    (tree / "version.txt").write_text("9.9\n")
    git(tree, "init", "--quiet")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "all", date="2026-11-26T00:00:00Z")
    commit = git(tree, "rev-parse", "--short", "HEAD").strip()
    label, root = drift.opened(str(tree / ".git"), tmp_path / "scratch")
    assert label == f"DeepSpeed 9.9, commit {commit} of 2026-11-26" == drift.opened(str(tree), tmp_path)[0]
    assert (root / "deepspeed/zero.py").read_text() == KNOWN
    git(tree, "rm", "--quiet", "-r", "deepspeed")
    git(tree, "commit", "--quiet", "--message", "none")
    with pytest.raises(Failed, match="has no folder deepspeed"):
        drift.opened(str(tree / ".git"), tmp_path / "none")


@pytest.mark.deep
def test_drift_is_none_on_base(tmp_path: Path) -> None:
    """Each kind of use is collected: patches, Protocols with the classes that they describe, and imports."""
    text = (ROOT / "deepspeed_ext" / "deepspeed_types.py").read_text(encoding="utf-8")
    assert {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)} == set(usage.PROTOCOLS)
    base = drift.known(tmp_path)
    used = drift.uses(base, ROOT, PATCHES, tmp_path)
    found = drift.report(requirement().version, base, ROOT, used, tmp_path)
    assert not found.differences and found.used > 600, drift.as_text(found)
    targets = {use["target"] for use in used}
    assert {patch.target for patch in PATCHES} <= targets and "deepspeed.runtime.compiler:lazy_disable" in targets
    for of in usage.PROTOCOLS.values():
        assert any(target.startswith(f"{name}.") for name in of for target in targets), of
