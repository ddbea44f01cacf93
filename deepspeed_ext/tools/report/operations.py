# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The operations of DeepSpeed's backend for communication: what they are given, and what a rank receives by them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import irecv

Given = Mapping[str, Any]


@dataclass(frozen=True)
class Operation:
    """One of ``deepspeed.comm.torch.TorchBackend``'s.

    Attributes:
        arguments: their names, in order: DeepSpeed's decorators hide the signature.
        received: returns the bytes that a rank receives, of its arguments and the ranks of the group.
        asynchronous: whether it always returns a handle.
    """

    arguments: tuple[str, ...]
    received: Callable[[Given, int], float]
    asynchronous: bool = False

    def given(self, args: Iterable[Any], kwargs: Given) -> dict[str, Any]:
        """Return its arguments by name."""
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}


def _bytes(value: Any) -> float:
    return float(value.nbytes if isinstance(value, Tensor) else sum(one.nbytes for one in value))


def _share(name: str, times: float = 1.0) -> Callable[[Given, int], float]:
    """Return what counts the parts of a tensor, or of several, that other ranks have, so many times."""
    return lambda given, ranks: times * _bytes(given[name]) * (ranks - 1) / ranks


def _whole(name: str) -> Callable[[Given, int], float]:
    return lambda given, ranks: _bytes(given[name]) if ranks > 1 else 0.0


def _nothing(given: Given, ranks: int) -> float:
    return 0.0


def _messages(given: Given, ranks: int) -> float:
    return sum(_bytes(one.tensor) for one in given["p2p_op_list"] if one.op is irecv)


_ENDS = ("group", "async_op")
# A reduce to one rank passes through all of them, as it does in a ring: each receives about what the others have.
OPERATIONS: Mapping[str, Operation] = {
    "all_reduce": Operation(("tensor", "op", *_ENDS), _share("tensor", 2)),
    "inference_all_reduce": Operation(("tensor", "op", "group"), _share("tensor", 2)),
    "all_reduce_coalesced": Operation(("tensors", "op", *_ENDS), _share("tensors", 2)),
    "reduce": Operation(("tensor", "dst", "op", *_ENDS), _share("tensor")),
    "reduce_scatter": Operation(("output", "input_list", "op", *_ENDS), _share("input_list")),
    "reduce_scatter_tensor": Operation(("output_tensor", "input_tensor", "op", *_ENDS), _share("input_tensor")),
    "broadcast": Operation(("tensor", "src", *_ENDS), _share("tensor")),
    "all_gather": Operation(("tensor_list", "tensor", *_ENDS), _share("tensor_list")),
    "all_gather_into_tensor": Operation(("output_tensor", "input_tensor", *_ENDS), _share("output_tensor")),
    "all_gather_coalesced": Operation(("output_tensors", "input_tensors", *_ENDS), _share("output_tensors")),
    "all_to_all_single": Operation(
        ("output", "input", "output_split_sizes", "input_split_sizes", *_ENDS), _share("output")
    ),
    "all_to_all": Operation(("output_tensor_list", "input_tensor_list", *_ENDS), _share("output_tensor_list")),
    "gather": Operation(("tensor", "gather_list", "dst", *_ENDS), _nothing),
    "scatter": Operation(("tensor", "scatter_list", "src", *_ENDS), _share("tensor")),
    "send": Operation(("tensor", "dst", "group", "tag"), _nothing),
    "recv": Operation(("tensor", "src", "group", "tag"), _whole("tensor")),
    "isend": Operation(("tensor", "dst", "group", "tag"), _nothing, asynchronous=True),
    "irecv": Operation(("tensor", "src", "group", "tag"), _whole("tensor"), asynchronous=True),
    "batch_isend_irecv": Operation(("p2p_op_list",), _messages, asynchronous=True),
    "barrier": Operation(("group", "async_op", "device_ids"), _nothing),
}
