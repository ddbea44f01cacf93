# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Rank processes that have imported the frameworks."""

import os
from collections.abc import Iterator

import pytest

from tests.harness import ranks as rank_pools

# What the cases use of the frameworks, which import most of themselves late.
_FRAMEWORKS = ("transformers.trainer", "transformers.models.llama.modeling_llama", "peft", "trl.trainer.sft_trainer")
_FRAMEWORKS += ("trl.trainer.dpo_trainer", "lightning.pytorch.strategies.deepspeed", "bitsandbytes")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the server import the frameworks while earlier tests run."""
    needed = any("frameworks" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not session.config.getoption("collectonly"):
        rank_pools.fork_server(_FRAMEWORKS)


@pytest.fixture(scope="session")
def frameworks() -> Iterator[rank_pools.RankPool]:
    """``frameworks(4).run(fn, ...)``: as ``ranks``, but the ranks are forked with the frameworks imported."""
    pool = rank_pools.RankPool(preload=_FRAMEWORKS)
    yield pool
    pool.close()


@pytest.fixture
def group(request: pytest.FixtureRequest, frameworks: rank_pools.RankPool) -> rank_pools.Ranks:
    """Ranks in groups of 2: one group in the first tier, two in the deep tier."""
    return frameworks(4 if request.node.get_closest_marker("deep") else 2)
