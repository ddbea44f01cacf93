# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs g++ for tests."""

import subprocess

COMPILER = "g++"


def run(*command: str) -> None:
    """Run a command of the compiler's; if it fails, raise RuntimeError with the end of its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-5000:]}")
