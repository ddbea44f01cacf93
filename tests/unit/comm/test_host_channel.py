# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Host channels: number of connections, any text, disks slower than the timeout, and lost connections."""

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from deepspeed import comm as dist

from deepspeed_ext.comm import host_channel
from deepspeed_ext.comm.agreement import WORLD, all_gather_texts, require_same, run_on_all_or_raise, unique_number
from tests.harness.snapshots import error_of

pytestmark = pytest.mark.quick
BYTES = b"a path of bytes \xff\xe9".decode(errors="surrogateescape")
TEXTS = ("", "plain", "Zoë", BYTES, "half of a pair \ud800", "é" * 5000)


@pytest.mark.parametrize("world", [1, 2, 31, 32, 33, 1024, 1025, 4096])
def test_tree_groups_are_small_and_equal_on_all_members(world: int) -> None:
    trees = [host_channel.tree(rank, world) for rank in range(world)]
    for rank, groups in enumerate(trees):
        assert all(groups[level] == trees[member][level] for level, ranks in enumerate(groups) for member in ranks)
        assert sum(len(ranks) - 1 for ranks in groups) <= 31 * 3, "connections"
        assert not groups or groups[-1][0] == 0 or rank != groups[-1][0], "the leader of a group is in a larger one"


def test_votes_texts_and_slow_disks(ranks: Any) -> None:
    for rank, (numbers, texts, messages, results, seconds) in enumerate(ranks(5).run(channel_case)):
        assert numbers == [-4, 10, 7]
        assert texts[:3] == list(TEXTS[:3]) and "\\udcff\\udce9" in texts[3] and "\\ud800" in texts[4]
        assert texts[5].startswith("éé") and 2000 < len(texts[5]) < 2100
        assert messages == [f"from {(rank - 1) % 5}" + "x" * ((rank - 1) % 5)]
        assert results == [rank, "ValueError: no"] and seconds > 3.0


def channel_case() -> tuple[list[int], list[str], list[str], list[Any], float]:
    """Return votes, texts, and messages over a tree of pairs, and results of disks, one slower than the timeout."""
    with (
        mock.patch.object(host_channel, "_FAN_OUT", 2),
        mock.patch.object(host_channel, "timeout_of", lambda group: timedelta(seconds=2.5)),
    ):
        channel = host_channel.HostChannel(unique_number())
        rank, world = channel.rank, channel.world
    numbers = [channel.all_reduce_min(-rank), channel.all_reduce_sum(rank), channel.all_reduce_min(7 + rank)]
    texts = [channel.broadcast_text(text if rank == 3 else "another one", 3) for text in TEXTS]
    messages = [channel.exchange_text(f"from {rank}" + "x" * rank, (rank + 1) % world, (rank - 1) % world)]
    begin = time.monotonic()

    def slow() -> int:
        time.sleep(3.5 if rank == 2 else 0.0)
        return rank

    def fail() -> None:
        raise ValueError("no")

    results = [channel.wait_for(slow), error_of(channel.wait_for, fail)]
    seconds = time.monotonic() - begin
    channel.end_worker()
    channel.close()
    return numbers, texts, messages, results, seconds


@pytest.mark.parametrize("vote", [True, False])
def test_lost_connection_raises_on_all_ranks_at_once(ranks: Any, vote: bool) -> None:
    for message, seconds in ranks(3).run(lost_case, vote):
        assert message.startswith("ChannelError: ") and seconds < 60.0, (message, seconds)
        assert vote or "closed" in message, message


def lost_case(vote: bool) -> tuple[str, float]:
    """Return the error of a vote, or of a first message, after a rank has closed its connections, and its seconds."""
    channel = host_channel.HostChannel(unique_number())
    channel.all_reduce_min(0)
    rank = channel.rank
    if rank == 1:
        channel.close()
    begin = time.monotonic()
    if vote:
        message = error_of(channel.all_reduce_min, 0)
    else:
        message = error_of(channel.exchange_text, "a text", (rank + 1) % 3, (rank - 1) % 3)
    channel.close()
    return message, time.monotonic() - begin


class Unreadable(Exception):
    """An error whose text cannot be read."""

    def __str__(self) -> str:
        raise LookupError("no text")


def test_all_ranks_receive_any_error_text(ranks: Any) -> None:
    for messages, texts, comparisons in ranks(2).run(texts_case):
        for message, text in zip(messages, 2 * ["\\udcff\\udce9"] + 2 * ["LookupError"], strict=True):
            assert message.startswith("RuntimeError: rank 1: it failed: ") and text in message, message
        assert texts == [[text, f"{text}1"] for text in TEXTS] and comparisons == ["", ""]


def texts_case() -> tuple[list[str], list[list[str]], list[str]]:
    """Return the errors of one rank, the texts of both, and whether such texts can be compared."""
    channel, rank = host_channel.HostChannel(unique_number()), dist.get_rank()

    def fail(error: Exception) -> None:
        if rank == 1:
            raise error

    def messages_of(errors: Iterable[Exception]) -> list[str]:
        return [
            error_of(run_on_all_or_raise, lambda error=error: fail(error), "it failed", RuntimeError, over)
            for error in errors
            for over in (WORLD, channel)
        ]

    messages = messages_of((OSError(28, "No space", BYTES), Unreadable()))
    texts = [all_gather_texts(text if rank == 0 else f"{text}1") for text in TEXTS]
    comparisons = [error_of(require_same, "a text", text) for text in (BYTES, TEXTS[4])]
    channel.end_worker()
    channel.close()
    return messages, texts, comparisons
