# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels, emulated on the CPU, give the bits of the reference; and the emulator finds faults."""

import re
import subprocess
import sys

import pytest

from deepspeed_ext.op_builder import source_folder
from scripts import ROOT
from tests.campaigns.kernels import mutants
from tests.harness.cuda_on_cpu import building
from tests.harness.cuda_on_cpu.emulator import OPERATORS
from tests.harness.tiers import deep

needs_a_compiler = pytest.mark.skipif(bool(building.missing()), reason=f"needs {building.missing()}")


def printed_by(*command: str) -> str:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@needs_a_compiler
@pytest.mark.parametrize(
    "build, amount",
    [("plain", 0.02), *deep(("checked", 0.01), ("plain", 1), ("checked", 0.1), ("address", 0.01), ("address", 0.05))],
)
def test_all_bits_are_equal(build: str, amount: float) -> None:
    printed = printed_by("tests.campaigns.kernels", "--build", build, "--amount", str(amount))
    assert printed.endswith("all bits equal\n")
    sections = re.findall(rf"^{build} (\w+): (\d+) cases$", printed, re.MULTILINE)
    assert len(sections) >= 6 and all(int(cases) for _, cases in sections), sections


@needs_a_compiler
@pytest.mark.deep
def test_arithmetic_is_right_for_every_number() -> None:
    printed = printed_by("tests.campaigns.kernels.numbers")
    assert printed.count(": 0 wrong\n") == 4, printed


@needs_a_compiler
@pytest.mark.deep
def test_kernels_pass_over_memory_once() -> None:
    """Bytes are those of the page; sectors, which depend on the compiler, where it is the page's."""
    page = (ROOT / "csrc" / "README.md").read_text(encoding="utf-8")
    found, written = figures_of(printed_by("tests.campaigns.kernels.traffic")), figures_of(page)
    assert found.keys() == written.keys() and len(found) == 29
    version = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout
    for case, (moved, *sectors) in found.items():
        assert moved == pytest.approx(written[case][0], abs=0.02) and moved <= 1.6, case
        if f"g++ {version.split('.')[0]}." in page:
            assert sectors == pytest.approx(written[case][1:], abs=0.05), case


def figures_of(text: str) -> dict[tuple[str, str], list[float]]:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    return {(operator, case): [float(figure) for figure in figures] for operator, case, *figures in rows}


@needs_a_compiler
@pytest.mark.deep
@pytest.mark.parametrize("number", range(len(mutants.FAULTS)))
def test_a_fault_is_found(number: int) -> None:
    assert mutants.find_fault(mutants.FAULTS[number], building.LIBRARIES)


@pytest.mark.quick
def test_all_operators_for_cuda_are_compared() -> None:
    registered = [re.findall(r'library\.impl\("(\w+)"', path.read_text()) for path in source_folder().glob("*.cu")]
    assert sorted(name for names in registered for name in names) == sorted(OPERATORS)
