# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The check that runs DeepSpeed's own tests with our classes, on a suite of a few tests without a checkout."""

from pathlib import Path

import pytest

from tests.campaigns.upstream import outcomes
from tests.campaigns.upstream import suite as suites

TESTS = """
import os, time

def test_passes(): pass
def test_fails(): assert os.environ["NOBODY"]
def test_hangs(): time.sleep(60)
def test_dies(): os._exit(3)
def test_last(): pass
"""
STRATEGY = """
def test_strategy():
    from deepspeed.runtime.config import DeepSpeedConfig
    config = DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": 2}})
    assert config.zero_config.paro_strategy == "NGG"
"""


@pytest.fixture
def suite(tmp_path: Path) -> suites.Suite:
    """A suite of a few tests that have nothing to do with DeepSpeed's, and one that asks which strategy it got."""
    unit = tmp_path / "checkout" / "tests" / "unit"
    unit.mkdir(parents=True)
    files = {"test_some.py": TESTS, "test_strategy.py": STRATEGY, "test_bad.py": "import nothing", "common.py": ""}
    for name, text in files.items():
        (unit / name).write_text(text, encoding="utf-8")
    (unit.parent / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return suites.Suite.of(tmp_path / "checkout", tmp_path / "work", limit=5.0, jobs=1)


@pytest.mark.deep
def test_hanging_and_dying_tests_end_no_other(suite: suites.Suite) -> None:
    tests, uncollected = suite.collect(["unit"])
    assert len(tests) == 6 and list(uncollected) == ["unit/test_bad.py"]
    found = suite.run([test for test in tests if "test_some" in test], suites.Side())
    kinds = {test.partition("::test_")[2]: outcome.kind for test, outcome in found.items()}
    assert kinds == {"passes": "passed", "last": "passed", "fails": "failed", "hangs": "hung", "dies": "hung"}
    assert "KeyError: 'NOBODY'" in found["unit/test_some.py::test_fails"].cause
    assert all("crashed while running" in found[f"unit/test_some.py::test_{name}"].text for name in ("hangs", "dies"))


@pytest.mark.deep
def test_a_strategy_is_forced_where_sections_are_parsed(suite: suites.Suite) -> None:
    suite.limit = 120.0
    (outcome,) = suite.run(["unit/test_strategy.py::test_strategy"], suites.Side(("NNG", "NGG", "GGG"))).values()
    assert outcome.kind == outcomes.PASSED, outcome.text
