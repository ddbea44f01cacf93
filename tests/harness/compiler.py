# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs g++ and nvcc for tests."""

import subprocess

COMPILER = "g++"


def run(*command: str) -> str:
    """Run a compiler, and return its output; if it fails, raise RuntimeError with the end."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-5000:]}")
    return done.stdout + done.stderr
