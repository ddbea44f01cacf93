# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The check that runs DeepSpeed's own tests with our classes: what it chooses, runs and compares. No checkout."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed_ext.config.refused import refuse_beside
from deepspeed_ext.strategy import STRATEGIES
from tests.campaigns.upstream import outcomes
from tests.campaigns.upstream import suite as suites
from tests.campaigns.upstream.outcomes import Known, Outcome


def test_a_refusal_is_no_failure() -> None:
    config = SimpleNamespace(zero_config=SimpleNamespace(zenflow=True), _param_dict={"zero_optimization": {}})
    with pytest.raises(ValueError) as refused:
        refuse_beside(config, STRATEGIES["NIG"])  # type: ignore[arg-type]
    outcome = Outcome.of({"kind": "failed", "text": f"E   ValueError: {refused.value}"})
    assert outcome.kind == outcomes.REFUSED
    assert outcome.text == "zero_optimization.zenflow cannot be combined with: ZenFlow reduces gradients its own way"
    other = Outcome.of({"kind": "failed", "text": "E   ValueError: a group of 2 does not divide 3 ranks"})
    assert other.kind == outcomes.FAILED and other.cause == "ValueError: a group of 2 does not divide 3 ranks"


def test_differences_are_known_by_test_and_cause() -> None:
    stock = dict.fromkeys(("f.py::a[1-x]", "f.py::b", "f.py::c", "f.py::d"), Outcome("passed"))
    ours = {
        "f.py::a[1-x]": Outcome("failed", "E   KeyError: 'x'"),
        "f.py::b": Outcome("hung"),
        "f.py::c": Outcome("refused"),
        "f.py::d": Outcome("passed"),
    }
    for cause, reason in (("KeyError: 'x'", "known"), ("KeyError: 'y'", None)):
        found = outcomes.differences(stock, ours, [Known("f.py::a[1-*]", cause, "known")], "NIG-NIG-IIG")
        assert {one.test: one.reason for one in found} == {"f.py::a[1-x]": reason, "f.py::b": None}


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


def test_hanging_and_dying_tests_end_no_other(suite: suites.Suite) -> None:
    tests, uncollected = suite.collect(["unit"])
    assert len(tests) == 6 and list(uncollected) == ["unit/test_bad.py"]
    found: dict[str, Outcome] = {}
    suite.run([test for test in tests if "test_some" in test], suites.Side(), found.update)
    kinds = {test.partition("::test_")[2]: outcome.kind for test, outcome in found.items()}
    assert kinds == {"passes": "passed", "last": "passed", "fails": "failed", "hangs": "hung", "dies": "hung"}
    assert "KeyError: 'NOBODY'" in found["unit/test_some.py::test_fails"].cause
    assert "no end after" in found["unit/test_some.py::test_hangs"].text
    assert "status 3" in found["unit/test_some.py::test_dies"].text


@pytest.mark.deep
def test_a_strategy_is_forced_where_sections_are_parsed(suite: suites.Suite) -> None:
    suite.limit = 120.0
    found: dict[str, Outcome] = {}
    suite.run(["unit/test_strategy.py::test_strategy"], suites.Side(("NNG", "NGG", "GGG")), found.update)
    (outcome,) = found.values()
    assert outcome.kind == outcomes.PASSED, outcome.text
