# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The stream of reductions, beside the one that computes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import Tensor


class ReductionStream:
    """DeepSpeed's stream of reductions, which may be none.

    Args:
        find: returns it; None where reductions run on the current stream.
        takes_turns: whether DeepSpeed's two buffers of a bucket take turns: what fills one of them waits for the
            reductions that were queued before, which may read it.
        by_device: whether the device orders by itself what depends on each other, so that nothing waits here.
    """

    def __init__(
        self, find: Callable[[], Any], takes_turns: bool = False, by_device: Callable[[], bool] = lambda: False
    ) -> None:
        self.find = find
        self._takes_turns = takes_turns
        self._by_device = by_device

    @contextmanager
    def after_current(self, bucket: Any = None, freed: Sequence[Tensor] = ()) -> Iterator[None]:
        """Run on the stream, after everything that the current one was given.

        Args:
            bucket: of DeepSpeed's, filled by other streams as well, which it names.
            freed: tensors that are read here and may be freed on the current stream before.
        """
        stream, current = self.find(), get_accelerator().current_stream()
        for event in bucket.ready_events.values() if bucket else ():
            (current if stream is None else stream).wait_event(event)
        if stream is None:
            yield
            return
        if not self._by_device():
            for producer in {current, *(bucket.copy_streams if bucket else ())}:
                stream.wait_stream(producer)  # or a reduction would read gradients that are not written yet
            if self._takes_turns:
                current.wait_stream(stream)  # or the next gradients would be written over those that are reduced
            for tensor in freed:
                tensor.record_stream(stream)
        with get_accelerator().stream(stream):
            yield

    def receive_current(self) -> None:
        """Make the stream wait for everything that the current one was given."""
        if (stream := self.find()) is not None:
            stream.wait_stream(get_accelerator().current_stream())

    def wait(self) -> None:
        """Make the current stream wait for everything that this one was given."""
        if (stream := self.find()) is not None and not self._by_device():
            get_accelerator().current_stream().wait_stream(stream)

    def synchronize(self) -> None:
        """Make the host wait for the stream."""
        if (stream := self.find()) is not None:
            stream.synchronize()
