# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels compile with the builder's flags, also where there is no GPU and torch has no CUDA."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from deepspeed_ext.op_builder import LocoBuilder, source_folder
from tests.harness.tiers import deep

NVCC = shutil.which("nvcc")


@pytest.mark.skipif(NVCC is None, reason="needs nvcc, of the CUDA toolkit")
@pytest.mark.parametrize("capability", ["8.0", *deep("9.0")])
@pytest.mark.parametrize("source", ["loco_cuda.cu", "difference_cuda.cu", "lossless_cuda.cu"])
def test_the_cuda_kernels_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, capability: str
) -> None:
    assert NVCC is not None
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(Path(NVCC).parents[1]))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", capability)
    builder = LocoBuilder()
    builder.build_for_cpu = False
    assert str(source_folder() / source) in builder.sources()
    arguments = builder.strip_empty_entries(builder.nvcc_args())
    assert any(argument.endswith(f"code=sm_{capability.replace('.', '')}") for argument in arguments), arguments
    assert "-fmad=false" in arguments and "--use_fast_math" not in arguments
    folders = [*builder.include_paths(), *cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    built = tmp_path / "cuda.o"
    command = [NVCC, *arguments, *(f"-I{folder}" for folder in folders), "-Xcompiler=-fPIC", "-o", str(built)]
    command += ["-DTORCH_EXTENSION_NAME=loco", "-c", str(source_folder() / source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stdout + done.stderr, done.stdout + done.stderr
    assert built.stat().st_size
