# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the simulated device into a library, once for each version of its sources. This imports no torch."""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts import ROOT
from tests.harness.compiler import COMPILER, run

HERE = Path(__file__).resolve().parent
LIBRARIES = ROOT / "build" / "device_on_host"  # where libraries are kept
_SOURCES = ("device.cpp", "memory.cpp", "operators.cpp")
_HEADERS = ("memory.h",)
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas")


def missing() -> str:
    """Return the tools that are missing for a build; empty if there are none."""
    return "" if shutil.which(COMPILER) else COMPILER


def build_library(folder: Path = LIBRARIES) -> Path:
    """Build the device, unless the same sources were built for the same torch, and return the library."""
    texts = [(HERE / file).read_text(encoding="utf-8") for file in (*_SOURCES, *_HEADERS)]
    parts = [importlib.metadata.version("torch"), *_FLAGS, *texts]
    library = folder / f"{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with ThreadPoolExecutor(2) as pool:
                objects = list(pool.map(lambda file: _object(folder, file), _SOURCES))
            torchs = _torch() / "lib"
            link = [COMPILER, "-shared", "-Wl,--no-undefined", *objects, f"-L{torchs}", "-ltorch_cpu", "-lc10"]
            run(*link, f"-Wl,-rpath,{torchs}", "-o", f"{library}.new")
            Path(f"{library}.new").rename(library)
    return library


def _object(folder: Path, file: str) -> str:
    created = folder / f"{Path(file).stem}.o"
    includes = [f"-isystem{_torch() / 'include' / name}" for name in ("", "torch/csrc/api/include")]
    run(COMPILER, *_FLAGS, *includes, "-c", str(HERE / file), "-o", str(created))
    return str(created)


def _torch() -> Path:
    results = importlib.util.find_spec("torch")
    assert results is not None and results.origin is not None
    return Path(results.origin).parent
