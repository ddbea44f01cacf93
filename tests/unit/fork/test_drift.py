# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The report on another DeepSpeed: of small packages in the place of this one, the DeepSpeed we know, and another."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.integration.patches import PATCHES
from deepspeed_ext.integration.symbols import Patch
from scripts import ROOT
from scripts.fork import drift, usage

OURS = '''"""Strategies: what the tests call so."""
from deepspeed import zero
from deepspeed.zero import LIMIT, Optimizer, extended, helper, moved
from typing_extensions import override

class Ours(Optimizer):
    """An optimizer of ours. More."""
    @override
    def step(self): return helper(self.shard, LIMIT) + extended(moved(1, 2))

    @zero.lazy
    def own(self): ...
'''
KNOWN = """LIMIT = 4
def helper(one, two=2): ...
def lazy(function): return function
def extended(one): ...
def moved(one, two): ...
class Optimizer:
    def __init__(self): self.shard = []
    def step(self): ...
    def reduce(self, grads): ...
"""
CHANGED = """LIMIT = 8
def helper(one, *, two=2): ...
def extended(one, two=None): ...
def moved(two, one): ...
class Optimizer:
    def step(self, *, scale): ...
    def reduce(self, grads, group): ...
    def own(self): ...
"""
ROWS = (Patch("deepspeed.zero:Optimizer.reduce", "reduce gradients", "(self, grads)"),)
REPORT = """9 differences break something, 1 break nothing; 11 symbols are used
  import    AttributeError: module 'deepspeed.zero' has no attribute 'lazy' (deepspeed_ext/adapter.py, line 11)
  value     deepspeed.zero.LIMIT: 4 -> 8
  new       deepspeed.zero.Optimizer.own: nothing of that name -> (self)
  arguments deepspeed.zero.Optimizer.reduce: (self, grads) -> (self, grads, group)
  missing   deepspeed.zero.Optimizer.shard: a value -> gone
  arguments deepspeed.zero.Optimizer.step: (self), ours takes (self) -> (self, *, scale)
  arguments deepspeed.zero.helper: (one, two=2) -> (one, *, two=2)
  missing   deepspeed.zero.lazy: (function) -> gone
  arguments deepspeed.zero.moved: (one, two) -> (two, one)
  arguments deepspeed.zero.extended: (one) -> (one, two=None)"""


def package(folder: Path, module: str, text: str) -> Path:
    path = folder / f"{module.replace('.', '/')}.py"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    (path.parent / "__init__.py").touch()
    return folder


@pytest.mark.quick
def test_each_difference_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """A module that cannot be imported does not end the report; the status is whether something breaks."""
    ours = package(tmp_path / "ours", "deepspeed_ext.adapter", OURS)
    shutil.copy(ROOT / "deepspeed_ext" / "overrides.py", ours / "deepspeed_ext")
    expected_package = package(tmp_path / "known", "deepspeed.zero", KNOWN)
    changed = package(tmp_path / "changed", "deepspeed.zero", CHANGED)
    monkeypatch.setattr(drift, "supported_deepspeed", lambda _: expected_package)
    assert drift.main([str(expected_package), str(changed)], False, None, ROWS, ours) == 1
    fitting, _, other = capsys.readouterr().out.partition("\n")
    assert ": 0 differences break something; 11" in fitting and "  breaks adapter: An optimizer of ours\n" in other
    assert re.sub(r"\n {12}.*", "", other.partition(": ")[2]).rstrip() == REPORT
    assert drift.main(["newest"], True, None, ROWS, ours) == 2
    assert "or a git directory, got newest" in capsys.readouterr().err


@pytest.mark.deep
def test_drift_is_none_on_base(tmp_path: Path) -> None:
    """Each kind of use is collected: patches, Protocols with the classes that they describe, and imports."""
    used = drift.uses(base := drift.supported_deepspeed(tmp_path), ROOT, PATCHES, tmp_path)
    assert not drift.report("BASE", base, ROOT, used, tmp_path).differences
    targets = " ".join(use["target"] for use in used)
    assert len(used) > 600 and "deepspeed.runtime.compiler:lazy_disable" in targets
    assert all(f"{of[0]}." in targets for of in usage.PROTOCOLS.values())
