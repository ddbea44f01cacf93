# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Run what may never end."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """What became of it.

    Attributes:
        answer: what was returned.
        error: what was raised, or that it did not end; empty if it returned.
        abandoned: whether it still runs, in a thread that nobody waits for.
    """

    answer: Any = None
    error: str = ""
    abandoned: bool = False


def within(seconds: float, act: Callable[[], Any]) -> Outcome:
    """Run ``act`` in a thread for at most so many seconds.

    A call that blocks in C can be neither interrupted nor raised from. So a thread that is late is left behind, and
    the process has to end by ``os._exit``, since the interpreter could not be shut down around it.
    """
    found: list[Outcome] = []

    def run() -> None:
        try:
            found.append(Outcome(act()))
        except BaseException as error:  # also SystemExit: DeepSpeed's builders raise it
            found.append(Outcome(error=f"{type(error).__name__}: {str(error).strip() or 'no message'}"))

    thread = threading.Thread(target=run, name="doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else Outcome(error=f"it did not end within {seconds:g} s", abandoned=True)
