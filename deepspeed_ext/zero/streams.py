# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The stream of gradient reductions."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import Tensor


class ReductionStream:
    """DeepSpeed's stream of gradient reductions, if there is one.

    Args:
        ordered_by_device: whether to trust devices that order dependent operations of two streams themselves.
            DeepSpeed's stage 3 does not.

    Attributes:
        stream: the stream; None while reductions run on the current stream.
    """

    def __init__(self, ordered_by_device: bool = False) -> None:
        self.stream: Any = None
        self._ordered_by_device = ordered_by_device and bool(get_accelerator().resolves_data_dependency())

    def set_stream(self, stream: Any) -> None:
        """Reduce on this stream from now on; None for the current stream."""
        self.stream = stream

    @contextmanager
    def after_current(self, producers: Iterable[Any] = (), freed: Iterable[Tensor] = ()) -> Iterator[None]:
        """Run on the stream, after all work queued on the current stream.

        Args:
            producers: other streams, after whose work this also runs.
            freed: tensors that are read in this context and may be freed on the current stream earlier.
        """
        current = get_accelerator().current_stream()
        stream = self.stream or current
        for producer in {current, *producers} - {stream} if not self._ordered_by_device else ():
            stream.wait_stream(producer)  # or a reduction would read gradients that are not written yet
        if self.stream is None:
            yield
            return
        for tensor in freed:
            self.record(tensor)
        with get_accelerator().stream(stream):
            yield

    def record(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor that is freed on the current stream until this stream has read it."""
        if self.stream is not None and not self._ordered_by_device:
            tensor.record_stream(self.stream)  # or its memory would be reused while it is read

    def event(self) -> Any:
        """Return an event after all work queued so far; None on devices without streams."""
        stream = self.stream or get_accelerator().current_stream()
        return None if stream is None or self._ordered_by_device else stream.record_event()

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
