# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Pieces of code in fresh processes, forked from one that has imported the slow modules."""

import re
import subprocess
import sys

_PROGRAM = """
import os, sys
{first}
for name, code in {pieces!r}.items():
    print(">", name, flush=True)
    if not os.fork():
        try:
            exec(code, {{}})
        except BaseException as error:
            print("raised", type(error).__name__, error)
        os._exit(sys.stdout.flush() or 0)
    os.wait()
"""


def run_in_forks(first: str, pieces: dict[str, str]) -> dict[str, str]:
    """Run pieces of code, each in a fork of a process that has run ``first``, and return their outputs."""
    program = _PROGRAM.format(first=first, pieces=pieces)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(part.split("\n", 1) for part in re.split("^> ", done.stdout, flags=re.MULTILINE)[1:])
