# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Does a wheel pass the quick tests, with nothing of the repository's package in reach?

    python -m build && python -m tests.campaigns.wheel dist/*.whl

Makes a new environment with the pinned versions and the wheel, copies the tests without the package, its kernels and
``setup.py`` into an empty folder, and runs there what is marked quick. Tests that look at the sources are left out.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from scripts import ROOT

COPIED = ("tests", "scripts", "pyproject.toml")
OF_SOURCES = (
    *("test_house.py", "test_documents.py", "test_repository.py", "test_packaging.py", "test_documented_figures.py"),
    *("test_coming_from.py", "test_stock_bytes.py", "fork", "scripts", "harness", "perf", "campaigns"),
    *("integration/test_overrides.py", "integration/test_without_our_keys.py"),
)
_FROZEN = "tests/unit/config/test_refused.py::test_options_are_frozen"


def run(python: Path, *arguments: str, folder: Path) -> int:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
    return subprocess.run([str(python), "-m", *arguments], cwd=folder, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the quick tests against a wheel, in a new environment.")
    parser.add_argument("wheel", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as created:
        folder = Path(created)
        venv.create(folder / "environment", with_pip=True)
        python = folder / "environment" / "bin" / "python"
        pins = ROOT / "scripts" / "development.txt"
        if run(python, "pip", "install", "-q", "-r", str(pins), str(args.wheel.resolve()), folder=folder):
            return 2
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
        left_out = [*(f"--ignore=tests/unit/{name}" for name in OF_SOURCES), f"--deselect={_FROZEN}"]
        return run(python, "pytest", "-m", "quick and not deep", "-n2", "-pno:cacheprovider", *left_out, folder=folder)


if __name__ == "__main__":
    sys.exit(main())
