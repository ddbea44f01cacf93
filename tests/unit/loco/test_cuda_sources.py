# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels compile with the builder's flags, even without a GPU and with a torch without CUDA, and keep their
values in registers."""

from pathlib import Path

import pytest

from scripts import ROOT
from tests.campaigns.kernels import resources
from tests.harness import nvcc
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
