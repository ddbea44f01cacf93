# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The table of frameworks speaks of the versions that CI installs, and that are installed."""

import importlib.metadata
import os

import pytest

from scripts import ROOT
from tests.harness.frameworks import table


@pytest.mark.skipif("config.getoption('write_table', False)", reason="the table is being written")
@pytest.mark.skipif(
    os.environ.get("TEST_VERSIONS", "development") != "development", reason="other versions: tests/versions.md"
)
def test_versions_are_pinned_and_installed() -> None:
    pins = (ROOT / "scripts" / "development.txt").read_text().splitlines()
    found = {(framework, version) for (framework, _), version in table.rows().items()}
    assert len(found) >= 6 and len(found) == len({framework for framework, _ in found}), found
    for framework, version in found:
        assert f"{framework}=={version}" in pins, f"{framework} {version}: run with --write-table"
        try:
            installed = importlib.metadata.version(framework)
        except importlib.metadata.PackageNotFoundError:
            continue  # its tests are skipped
        assert installed == version, (
            f"{framework} {version} in the table, {installed} installed: run with --write-table"
        )
