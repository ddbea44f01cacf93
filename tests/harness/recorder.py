# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Records, in one process, which lines run in which test. See Note [How tests are recorded] in recordings.py."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from scripts import ROOT

FOLDER = "RECORD_TESTS_INTO"  # environment variables: the folder of the data files of all processes
CONTEXT = "RECORDED_TEST"
_STARTS = "COVERAGE_PROCESS_START"  # of coverage.py: the configuration of Python processes that are started
_MEASURED = ("deepspeed_ext", "scripts", "tests/campaigns", "tests/perf", "tests/unit")


def prepare(folder: Path) -> None:
    """Write coverage.py's configuration into an empty folder, and switch the recording on for later processes."""
    include = "".join(f"\n    {ROOT / name}/*" for name in _MEASURED)
    quiet = "no-data-collected,module-not-measured,module-not-imported,trace-changed"
    text = f"[run]\ndata_file = {folder / 'coverage'}\ncontext = ${{{CONTEXT}-}}\ncore = ctrace\nparallel = true\n"
    text += f"patch = _exit\ndisable_warnings = {quiet}\ninclude ={include}\n"
    (folder / "coveragerc").write_text(text, encoding="utf-8")
    os.environ[FOLDER] = str(folder)


class Recorder:
    """Records the lines of this process under the test that runs, and those of processes that are started by it."""

    def __init__(self, folder: Path) -> None:
        import coverage

        while inherited := coverage.Coverage.current():  # started by the environment, in a worker of pytest-xdist
            inherited.stop()
        os.environ[_STARTS] = str(folder / "coveragerc")
        self._coverage = coverage.Coverage(config_file=os.environ[_STARTS], context="")
        self._coverage.start()
        self._name = ""

    @contextlib.contextmanager
    def context(self, name: str) -> Iterator[None]:
        """Record under this name. In the end the data is on disk, since ranks are killed."""
        before = self._name
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, name: str) -> None:
        self._coverage.switch_context(name)
        self._name = os.environ[CONTEXT] = name

    def stop(self) -> None:
        self._coverage.stop()
        del os.environ[_STARTS]


def of_this_process() -> Recorder | None:
    return Recorder(Path(os.environ[FOLDER])) if FOLDER in os.environ else None


@contextlib.contextmanager
def start_unrecorded() -> Iterator[None]:
    """Start a process that is not recorded itself; processes that it forks may be."""
    configuration = os.environ.pop(_STARTS, None)
    try:
        yield
    finally:
        if configuration is not None:
            os.environ[_STARTS] = configuration
