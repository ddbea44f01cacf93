# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Records, in one process that runs tests, the lines that run and the files that are opened, by test.

See Note [How tests are recorded].
"""

import contextlib
import json
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts import ROOT

FOLDER = "RECORD_TESTS_INTO"  # environment variables: the folder of the processes' files
CONTEXT = "RECORDED_TEST"
_STARTS = "COVERAGE_PROCESS_START"  # of coverage.py: its configuration in Python processes that are started
_CONFIGURATION = "coveragerc"
MEASURED = ("deepspeed_ext", "scripts", "tests/campaigns", "tests/perf", "tests/unit")
_LOOKS = ("open", "os.listdir", "os.scandir")


def prepare(folder: Path) -> None:
    """Make each process that runs tests record into a folder, once it has a ``Recorder``."""
    measured = "".join(f"\n    {ROOT / name}/*" for name in MEASURED)
    quiet = "no-data-collected,module-not-measured,module-not-imported,trace-changed"
    settings = f"core = ctrace\nparallel = true\npatch = _exit\ndisable_warnings = {quiet}\ninclude ={measured}\n"
    text = f"[run]\ndata_file = {folder / 'coverage'}\ncontext = ${{{CONTEXT}-}}\n{settings}"
    (folder / _CONFIGURATION).write_text(text, encoding="utf-8")
    os.environ[FOLDER] = str(folder)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Processes started within this context are not recorded, but processes that they fork may be."""
    configuration = os.environ.pop(_STARTS, None)
    try:
        yield
    finally:
        if configuration is not None:
            os.environ[_STARTS] = configuration


class Recorder:
    """Records this process from now on; what runs outside of ``context`` belongs to no test.

    When a context ends, all of its records are on disk, since ranks are killed.
    """

    def __init__(self, folder: Path) -> None:
        import coverage

        self._context = ""
        self._opened = set[str]()
        self._notes = folder / f"{uuid.uuid4().hex}.notes"
        # Of a worker of pytest-xdist, which is a process that was started.
        while inherited := coverage.Coverage.current():
            inherited.stop()
        self._coverage = coverage.Coverage(config_file=str(folder / _CONFIGURATION), context="")
        self._coverage.start()
        os.environ[_STARTS] = str(folder / _CONFIGURATION)
        sys.addaudithook(self._look)

    @contextlib.contextmanager
    def context(self, name: str) -> Iterator[None]:
        """Record what happens within this context under a name, including in processes that are started here."""
        before = self._context
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def note(self, **values: Any) -> None:
        """Record something else."""
        with self._notes.open("a", encoding="utf-8") as notes:
            notes.write(json.dumps(values) + "\n")

    def stop(self) -> None:
        """End the recording, including that of processes that are started later."""
        self._coverage.stop()
        del os.environ[_STARTS]

    def _switch(self, name: str) -> None:
        self._coverage.switch_context(name)
        opened, self._opened = self._opened, set()
        if opened and self._context:
            self.note(context=self._context, opened=sorted(opened))
        self._context = os.environ[CONTEXT] = name

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _LOOKS:
            if not _is_an_import():
                self._keep(arguments[0])
        elif event == "subprocess.Popen":
            for argument in arguments[1] if isinstance(arguments[1], (list, tuple)) else ():
                self._keep(argument, str(arguments[2] or ""))

    def _keep(self, path: Any, folder: str = "") -> None:
        if isinstance(path, (str, os.PathLike)):
            found = os.path.abspath(os.path.join(folder, os.fsdecode(path)))
            if found.startswith(f"{ROOT}{os.sep}"):
                self._opened.add(found)


def is_on() -> bool:
    """Whether the session's tests are recorded."""
    return FOLDER in os.environ


def of_this_process() -> Recorder | None:
    """Return a new recorder if the session's tests are recorded."""
    return Recorder(Path(os.environ[FOLDER])) if is_on() else None


def _is_an_import() -> bool:
    """Whether Python opens a file to run it, or to show a line of it."""
    opener = sys._getframe(2).f_code.co_filename
    return opener.startswith("<frozen importlib") or opener.endswith("tokenize.py")
