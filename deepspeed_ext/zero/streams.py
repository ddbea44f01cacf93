# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The stream of gradient reductions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import Tensor


class ReductionStream:
    """DeepSpeed's stream of gradient reductions, if there is one.

    Args:
        double_buffered: whether DeepSpeed alternates between two buffers of a bucket. The copy into one of them waits
            for the reductions that were queued before, which may still read it.

    Attributes:
        stream: the stream; None while reductions run on the current stream.
    """

    def __init__(self, double_buffered: bool = False) -> None:
        self.stream: Any = None
        self._double_buffered = double_buffered
        # Some devices order dependent operations of two streams themselves. DeepSpeed's stage 3 does not rely on it.
        self._ordered_by_device = double_buffered and bool(get_accelerator().resolves_data_dependency())

    def set_stream(self, stream: Any) -> None:
        """Reduce on this stream from now on; None for the current stream."""
        self.stream = stream

    @contextmanager
    def after_current(self, bucket: Any = None, freed: Sequence[Tensor] = ()) -> Iterator[None]:
        """Run on the stream, after all work queued on the current stream.

        Args:
            bucket: a DeepSpeed bucket, which names other streams that fill it.
            freed: tensors that are read in this context and may be freed on the current stream earlier.
        """
        stream, current = self.stream, get_accelerator().current_stream()
        # Other streams may still copy gradients into the bucket.
        for event in bucket.ready_events.values() if bucket else ():
            (current if stream is None else stream).wait_event(event)
        if stream is None:
            yield
            return
        if not self._ordered_by_device:
            for producer in {current, *(bucket.copy_streams if bucket else ())}:
                stream.wait_stream(producer)  # or a reduction would read gradients that are not written yet
            if self._double_buffered:
                current.wait_stream(stream)  # or the next gradients would overwrite a bucket that is being reduced
            for tensor in freed:
                tensor.record_stream(stream)  # or their memory would be reused while it is read
        with get_accelerator().stream(stream):
            yield

    def wait_for_current(self) -> None:
        """Make the stream wait for all work queued on the current stream."""
        if self.stream is not None:
            self.stream.wait_stream(get_accelerator().current_stream())

    def wait(self) -> None:
        """Make the current stream wait for all work queued on this stream."""
        if self.stream is not None and not self._ordered_by_device:
            get_accelerator().current_stream().wait_stream(self.stream)

    def synchronize(self) -> None:
        """Make the host wait for the stream."""
        if self.stream is not None:
            self.stream.synchronize()
