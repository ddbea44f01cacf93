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
from tests.campaigns.upstream.inside import upstream_forced
from tests.campaigns.upstream.outcomes import Known, Outcome


def test_a_sample_takes_from_all_files_alike() -> None:
    tests = [f"a.py::t{i}" for i in range(20)] + ["b.py::t0"] + [f"c.py::t{i}" for i in range(3)]
    chosen = outcomes.sample(tests, 9, seed=0)
    files = [outcomes.file_of(test) for test in chosen]
    assert [files.count(file) for file in ("a.py", "b.py", "c.py")] == [5, 1, 3]
    assert chosen == outcomes.sample(list(reversed(tests)), 9, seed=0) and len(set(chosen)) == 9
    assert chosen != outcomes.sample(tests, 9, seed=1)
    assert outcomes.sample(tests, None, seed=0) == outcomes.sample(tests, 99, seed=0) == sorted(tests)


def test_a_refusal_is_no_failure() -> None:
    config = SimpleNamespace(zero_config=SimpleNamespace(zenflow=True), _param_dict={"zero_optimization": {}})
    with pytest.raises(ValueError) as refused:
        refuse_beside(config, STRATEGIES["NIG"])  # type: ignore[arg-type]
    source = '    raise ValueError(f"{key} cannot be combined with {SECTION}.{given}: {why}. Remove one of the two.")'
    outcome = Outcome.of({"kind": "failed", "text": f"{source}\nE   ValueError: {refused.value}"})
    assert outcome.kind == outcomes.REFUSED
    assert outcome.text == "zero_optimization.zenflow cannot be combined with: ZenFlow reduces gradients its own way"
    late = "ValueError: zero_optimization.paro_strategy NNG is not supported here: no layers. Set the stage to 1."
    assert Outcome.of({"kind": "error", "text": late}).kind == outcomes.REFUSED
    other = Outcome.of({"kind": "failed", "text": "E   ValueError: a group of 2 does not divide 3 ranks"})
    assert other.kind == outcomes.FAILED and other.cause == "ValueError: a group of 2 does not divide 3 ranks"


def test_a_difference_is_known_by_its_test_and_its_cause() -> None:
    stock = dict.fromkeys(("f.py::a[1-x]", "f.py::b", "f.py::c", "f.py::d", "f.py::e"), Outcome("passed"))
    stock["f.py::f"] = Outcome("failed")
    ours = {
        "f.py::a[1-x]": Outcome("failed", "E   KeyError: 'x'"),
        "f.py::b": Outcome("hung"),
        "f.py::c": Outcome("refused"),
        "f.py::d": Outcome("passed"),
        "f.py::e": Outcome("skipped", "no such device"),
        "f.py::f": Outcome("failed"),
    }

    def compared(*known: Known, side: str = "NIG-NIG-IIG") -> dict[str, str | None]:
        return {one.test: one.reason for one in outcomes.differences(stock, ours, known, side)}

    expected = {"f.py::a[1-x]": "known", "f.py::b": None, "f.py::e": None}
    assert compared(Known("f.py::a[1-*]", "KeyError: 'x'", "known")) == expected
    assert compared(Known("f.py::a[1-*]", "KeyError: 'y'", "known")) == dict.fromkeys(expected)
    assert compared(Known("g.py::*", "", "known")) == dict.fromkeys(expected)
    of_nig = Known("f.py::a[1-*]", "KeyError", "known", sides="NIG-*")
    assert compared(of_nig) == expected
    assert compared(of_nig, side="NNG-NGG-GGG") == dict.fromkeys(expected)
    rows = [
        Known("f.py::a*", "KeyError", "is seen"),
        Known("f.py::d", "", "is mended"),
        Known("g.py::*", "", "not run"),
        Known("f.py::d", "", "is seen at times", always=False),
    ]
    assert outcomes.unseen(ours, rows, "NIG-NIG-IIG") == [rows[1]]


def test_a_section_is_given_the_strategy_of_its_stage() -> None:
    groups = {"1": "NIG", "2": "NIG", "3": "IIG"}
    section = {"stage": 1, "reduce_bucket_size": 7}

    def forced(section: object, ranks: int | None = 4) -> object:
        return upstream_forced.with_strategy(section, groups, 2, ranks)

    assert forced(section) == {
        "stage": 2,
        "reduce_bucket_size": 7,
        "paro_strategy": "NIG",
        "paro_group_size": 2,
    }
    assert section == {"stage": 1, "reduce_bucket_size": 7}  # its owner's
    assert forced({"stage": 3}, ranks=3)["paro_group_size"] == 3  # type: ignore[index]
    assert "paro_group_size" not in forced({"stage": 3}, ranks=None)  # type: ignore[operator]
    for left in (True, None, {}, {"stage": 0}, {"stage": 3, "zeropp_loco_param": {}}, {"stage": "auto"}):
        assert forced(left) is left


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


def test_what_hangs_or_dies_is_one_outcome_of_many(suite: suites.Suite) -> None:
    tests, uncollected = suite.collect(["unit"])
    assert len(tests) == 6 and list(uncollected) == ["unit/test_bad.py"]
    found: dict[str, Outcome] = {}
    suite.run([test for test in tests if "test_some" in test], suites.Side(), found.update)
    kinds = {test.partition("::test_")[2]: outcome.kind for test, outcome in found.items()}
    assert kinds == {"passes": "passed", "last": "passed", "fails": "failed", "hangs": "hung", "dies": "hung"}
    assert "KeyError: 'NOBODY'" in found["unit/test_some.py::test_fails"].cause
    assert "no end after" in found["unit/test_some.py::test_hangs"].text
    assert "status 3" in found["unit/test_some.py::test_dies"].text


def test_a_strategy_is_forced_where_the_section_is_parsed(suite: suites.Suite) -> None:
    suite.limit = 120.0
    found: dict[str, Outcome] = {}
    suite.run(["unit/test_strategy.py::test_strategy"], suites.Side(("NNG", "NGG", "GGG")), found.update)
    (outcome,) = found.values()
    assert outcome.kind == outcomes.PASSED, outcome.text
