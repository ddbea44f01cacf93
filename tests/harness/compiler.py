# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""g++, for what tests compile."""

import subprocess

COMPILER = "g++"


def run(*command: str) -> None:
    """Run a command of the compiler's.

    Raises:
        RuntimeError: it fails; with the end of what it says.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-5000:]}")
