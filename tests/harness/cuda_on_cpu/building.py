# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the rewritten kernels and the emulator into a library, in one of three builds; keeps objects by content."""

import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from scripts import ROOT
from tests.harness.compiler import COMPILER, run
from tests.harness.cuda_on_cpu.rewriting import HEADERS, SOURCES, rewritten

HERE = Path(__file__).resolve().parent
LIBRARIES = ROOT / "build" / "cuda_on_cpu"  # where objects and libraries are kept
_EMULATOR = ("accesses.cpp", "blocks.cpp", "fibers.cpp", "host.cpp", "traffic.cpp")
_PROGRAM = "numbers.cpp"
_OWN_HEADERS = ("running.h", "shim.h")
# As the package builds its kernels for the CPU: each operation is rounded once, torch's stable ABI.
_FLAGS = ("-std=c++20", "-g1", "-fPIC", "-ffp-contract=off", "-mfma", "-mf16c", "-fno-strict-aliasing")
_FLAGS += ("-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA", "-Wall", "-Werror")
_FLAGS += ("-Wno-unknown-pragmas",)


class Build(NamedTuple):
    """Flags of one way to build them."""

    kernels: tuple[str, ...]
    emulator: tuple[str, ...]


# Each access calls the emulator: the instrumentation of gcc's checker of races, without its library.
_CHECKED = ("-O2", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")
_CHECKED += ("-fno-tree-loop-distribute-patterns",)
_SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
BUILDS = {
    "plain": Build(("-O2",), ("-O2",)),
    "checked": Build(_CHECKED, ("-O2", "-DCUDA_ON_CPU_CHECKED")),
    "address": Build(_SANITIZED, _SANITIZED),
}


@functools.cache
def cuda_headers() -> Path | None:
    """Return where NVIDIA's own headers of half and bfloat16 are, of the toolkit or of its wheel; None: nowhere."""
    nvcc = shutil.which("nvcc")
    places = [Path(nvcc).resolve().parents[1] / "include"] if nvcc else []
    places += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or []) if wheels else []:
        places += sorted(Path(folder).glob("*/include"))
    return next((location for location in places if (location / "cuda_fp16.h").is_file()), None)


def missing() -> str:
    """Return the tools that are missing for a build; empty if there are none."""
    if os.uname().machine != "x86_64":
        return "x86-64, whose registers the fibers know"
    if shutil.which(COMPILER) is None:
        return "g++"
    if cuda_headers() is None:
        return "NVIDIA's headers, of the CUDA toolkit or of the wheel nvidia-cuda-runtime"
    return ""


def build_library(sources: Path, folder: Path, name: str) -> Path:
    """Build the kernels in ``csrc/loco`` of a checkout, and return the library; ``folder`` has those of all builds.
    ValueError if a source has something that is not rewritten, RuntimeError if it does not compile."""
    sanitizers = [flag for flag in BUILDS[name].emulator if flag.startswith("-fsanitize")]
    checks = sanitizers or ["-Wl,--no-undefined"]  # sanitizers' functions come from what is preloaded
    return _built(sources, folder, name, SOURCES + _EMULATOR, ["-shared", "-Wl,-Bsymbolic", *checks])


def program(sources: Path, folder: Path) -> Path:
    """Build the program that tries all numbers, and return it; arguments and exceptions as of ``built``."""
    return _built(sources, folder, "plain", (_PROGRAM, *_EMULATOR), [])


def _built(sources: Path, folder: Path, name: str, files: Sequence[str], flags: Sequence[str]) -> Path:
    texts = {file: rewritten(file, (sources / file).read_text(encoding="utf-8")) for file in SOURCES + HEADERS}
    if unknown := {path.name for path in sources.glob("*cuda*")} - texts.keys():
        raise ValueError(f"expected the CUDA sources {sorted(texts)}, got also {sorted(unknown)}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(lambda file: _object(folder, name, file, texts), files))
        return _linked(folder, name, objects, flags)


def _object(folder: Path, name: str, file: str, texts: Mapping[str, str]) -> Path:
    """Compile one file, unless the same texts and flags have been."""
    build, of_kernels = BUILDS[name], file in (*SOURCES, _PROGRAM)
    root = Path(torch.__file__).parent / "include"
    folders = (cuda_headers(), root, root / "torch/csrc/api/include", sysconfig.get_paths()["include"])
    flags = [*_FLAGS, *(f"-isystem{folder}" for folder in folders), *(build.kernels if of_kernels else build.emulator)]
    own = {header: (HERE / header).read_text(encoding="utf-8") for header in _OWN_HEADERS}
    if of_kernels:
        own |= {header: texts[header] for header in HEADERS}
        flags += ["-x", "c++", "-include", str(HERE / "shim.h")]
    text = texts[file] if file in texts else (HERE / file).read_text(encoding="utf-8")
    location = folder / _key(*flags, text, *own.values())
    created = location / f"{Path(file).stem}.o"
    if not created.exists():
        location.mkdir(exist_ok=True)
        for header, content in {**own, file: text}.items():
            (location / header).write_text(content, encoding="utf-8")
        run(COMPILER, *flags, "-c", str(location / file), "-o", f"{created}.new")
        Path(f"{created}.new").rename(created)
    return created


def _linked(folder: Path, name: str, objects: Sequence[Path], flags: Sequence[str]) -> Path:
    created = folder / f"{name}-{_key(*map(str, objects), *flags)}{'.so' if '-shared' in flags else ''}"
    if not created.exists():
        torch_libraries = Path(torch.__file__).parent / "lib"
        link = [COMPILER, *flags, *map(str, objects), f"-L{torch_libraries}", "-ltorch_cpu", "-lc10"]
        run(*link, f"-Wl,-rpath,{torch_libraries}", "-o", f"{created}.new")
        Path(f"{created}.new").rename(created)
    return created


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def sanitizers() -> dict[str, str]:
    """Return the environment of a process that loads the build ``address``."""
    libraries = (run(COMPILER, f"-print-file-name={name}").strip() for name in ("libasan.so", "libubsan.so"))
    return {
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }


def line_of(library: Path, offset: int) -> str:
    """Return the lines of the kernels at an address in a library, the innermost first."""
    command = ["addr2line", "-i", "-e", str(library), hex(offset)]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    places = [re.sub(r" \(.*\)$", "", line).rpartition("/")[2] for line in lines]
    return " in ".join(location for location in places if not location.startswith(("?", "shim.h", *_EMULATOR)))
