# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A slow disk, emulated: a file takes as long as its bytes would at a rate, whoever writes it in this process.

All engines that are measured write by ``torch.save``. It does its work, and then sleeps for what is left of that time,
in the thread that has called it. What a file takes after that, such as a flush to the real disk, comes on top.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


class Disk:
    """The disk of this rank.

    Attributes:
        megabytes: per second that it writes; None for the real disk, without a limit.
    """

    def __init__(self) -> None:
        self.megabytes: float | None = None

    @contextmanager
    def between(self) -> Iterator[None]:
        """Put it between this process and its files."""
        with mock.patch.object(torch, "save", self._slow(torch.save)):
            yield

    def _slow(self, save: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(save)
        def slow(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
            begin = time.perf_counter()
            save(obj, f, *args, **kwargs)
            if self.megabytes is not None:
                path = f if isinstance(f, str | os.PathLike) else f.file_path()  # of a writer of DeepSpeed's
                due = os.path.getsize(path) / (self.megabytes * 1e6)
                time.sleep(max(0.0, due - (time.perf_counter() - begin)))

        return slow
