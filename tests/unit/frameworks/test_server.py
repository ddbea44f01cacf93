# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The process that the ranks of these tests are forked from."""

import os
from pathlib import Path
from typing import Any

from tests.harness.frameworks.table import needs

pytestmark = needs("transformers", "accelerate")


def server_case() -> tuple[list[str], bool]:
    """Further threads of this rank's fork server, and whether it has loaded a framework."""
    server = Path(f"/proc/{os.getppid()}")
    threads = [task for task in (server / "task").iterdir() if task.name != server.name]
    return [(thread / "comm").read_text().strip() for thread in threads], "tokenizers" in (server / "maps").read_text()


def test_it_has_imported_the_frameworks_and_can_be_forked(frameworks: Any) -> None:
    """A thread may hold a lock while the process is forked; that of pyarrow's jemalloc lets go of its locks before."""
    for threads, imported in frameworks(4).run(server_case):
        assert imported and set(threads) <= {"jemalloc_bg_thd"}, threads
