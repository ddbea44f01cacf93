# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that runs chosen tests of the files it is given, and tests that a recording does not know.

Ids on the command line would not do, since pytest refuses to run any test if one of them no longer exists.
"""

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chosen", type=Path, required=True, help="JSON: ids to run, and known ids in changed files")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    content = json.loads(config.getoption("chosen").read_text(encoding="utf-8"))
    run, changed = set(content["run"]), {file: set(known) for file, known in content["changed"].items()}
    kept, left = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        file = item.nodeid.split("::")[0]
        is_new = file in changed and item.nodeid not in changed[file]
        (kept if is_new or item.nodeid in run else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)
