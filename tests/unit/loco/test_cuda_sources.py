# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels compile with the builder's flags, even without a GPU and with a torch without CUDA, and keep their
values in registers."""

from pathlib import Path

import pytest

from scripts import ROOT
from tests.campaigns.kernels import resources
from tests.harness import nvcc
from tests.harness.nvcc import Taken
from tests.harness.tiers import deep

needs_nvcc = pytest.mark.skipif(nvcc.NVCC is None, reason="needs nvcc, of the CUDA toolkit")


@needs_nvcc
@pytest.mark.parametrize("capability", ["8.0", *deep("9.0", "10.0", "12.0")])
@pytest.mark.parametrize("source", nvcc.SOURCES)
def test_the_cuda_kernels_compile_without_local_memory(tmp_path: Path, source: str, capability: str) -> None:
    if not nvcc.knows(capability):
        pytest.skip(f"nvcc {nvcc.version()} does not know the architecture {capability}")
    arguments = nvcc.arguments([capability])
    assert any(argument.endswith(f"code=sm_{capability.replace('.', '')}") for argument in arguments), arguments
    assert "-fmad=false" in arguments and "--use_fast_math" not in arguments
    built = tmp_path / "cuda.o"
    kernels, said = nvcc.compiled(source, [capability], built, "-c")
    assert "warning" not in said, said
    assert built.stat().st_size
    assert len(kernels) == {"loco_cuda.cu": 24, "difference_cuda.cu": 12, "lossless_cuda.cu": 3}[source]
    assert not resources.in_local_memory(kernels)
    # What __launch_bounds__(kThreads, kResident) promises: thread blocks load while others compute.
    assert all(resources.occupancy(one)[0] >= 32 for one in kernels), resources.table(kernels)


@needs_nvcc
@pytest.mark.deep
def test_the_page_has_the_table_of_resources() -> None:
    page = (ROOT / "csrc" / "README.md").read_text(encoding="utf-8")
    if f"nvcc {nvcc.version()}" not in page:
        pytest.skip(f"the page has the figures of another nvcc than {nvcc.version()}")
    assert resources.table(resources.all_taken(resources.CAPABILITIES)) in page


@pytest.mark.quick
@pytest.mark.parametrize("capability, known", [("9.0", True), ("10.0", False), ("1.0", False)])
def test_an_older_nvcc_does_not_know_the_newest_architectures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: str, known: bool
) -> None:
    older = tmp_path / "nvcc"
    older.write_text("#!/bin/sh\nprintf 'compute_80\\ncompute_90\\ncompute_100a\\n'\n")
    older.chmod(0o755)
    monkeypatch.setattr(nvcc, "NVCC", str(older))
    assert nvcc.knows(capability) is known


SAID = """ptxas info    : 28 bytes gmem
ptxas info    : Compiling entry function '_ZN4loco12compress_tileILi8EEEv' for 'sm_120a'
ptxas info    : Function properties for _ZN4loco12compress_tileILi8EEEv
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 66 registers, used 1 barriers, 8 bytes cumulative stack size, 64 bytes smem
ptxas info    : Compile time = 276.432 ms
ptxas info    : Compiling entry function '_ZN4loco10apply_tileEv' for 'sm_80'
ptxas info    : Function properties for _ZN4loco10apply_tileEv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 22 registers, used 0 barriers, 424 bytes cmem[0]
"""


@pytest.mark.quick
def test_what_ptxas_says_is_read() -> None:
    spilled, small = nvcc.taken("a.cu", SAID)
    assert spilled == Taken("a.cu", "compress_tile", "_ZN4loco12compress_tileILi8EEEv", 120, 66, 64, 8, 16)
    assert small == Taken("a.cu", "apply_tile", "_ZN4loco10apply_tileEv", 80, 22, 0, 0, 0)
    [told] = resources.in_local_memory([spilled, small])
    assert told.startswith("_ZN4loco12compress_tileILi8EEEv of sm_120: ")


@pytest.mark.quick
@pytest.mark.parametrize(
    "architecture, registers, shared, expected",
    [  # by NVIDIA's occupancy calculator
        (80, 64, 64, (32, "registers")),
        (80, 65, 64, (24, "registers")),
        (80, 40, 0, (48, "registers")),
        (80, 32, 0, (64, "warps")),
        (120, 40, 0, (48, "warps")),
        (120, 48, 0, (40, "registers")),
        (120, 22, 40000, (16, "shared")),
        (90, 22, 40000, (40, "shared")),
    ],
)
def test_occupancy(architecture: int, registers: int, shared: int, expected: tuple[int, str]) -> None:
    assert resources.occupancy(Taken("a.cu", "a_tile", "a", architecture, registers, shared, 0, 0)) == expected
