# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The command ``report``: runs a script and records some of its steps."""

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed_ext.config.settings import REPORT_VARIABLE, ReportSettings

NAME = "report"
_DEFAULTS = ReportSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``report``, without importing DeepSpeed yet."""
    parser.add_argument("--folder", default=_DEFAULTS.folder, help="folder of the report (default: %(default)s)")
    parser.add_argument(
        "--after", type=int, default=_DEFAULTS.after, help="optimizer steps of warm-up (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=_DEFAULTS.steps, help="optimizer steps to record (default: %(default)s)"
    )
    parser.add_argument("--no-probe", dest="probe", action="store_false", help="do not measure links or predict")
    parser.epilog = "The script, with its arguments, comes after --."


def prepare(arguments: argparse.Namespace, command: Sequence[str], local_rank: str | None) -> None:
    """Check the arguments, and prepare this process, a launcher's rank, for the script.

    Args:
        arguments: arguments of ``report``.
        command: the script, with its arguments.
        local_rank: the ``deepspeed`` launcher's argument, which is passed on to the script.

    Raises:
        ValueError: there is no script, or a setting is not valid.
    """
    if not command or not Path(command[0]).is_file():
        script = command[0] if command else "nothing"
        raise ValueError(
            f"report runs a script, as in: torchrun ... -m deepspeed_ext report -- script.py --its-arguments; got "
            f"{script!r}, which is not a file."
        )
    names = ("folder", "after", "steps", "probe")
    settings = ReportSettings.parse({name: getattr(arguments, name) for name in names}, "report")
    os.environ[REPORT_VARIABLE] = settings.as_variable()
    passed_on = [] if local_rank is None else [f"--local_rank={local_rank}"]
    sys.argv = [command[0], *passed_on, *command[1:]]
    sys.path.insert(0, str(Path(command[0]).resolve().parent))


def run(script: str) -> None:
    """Run the script in this process; its exceptions are not caught."""
    runpy.run_path(script, run_name="__main__")
