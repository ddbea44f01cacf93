# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The self-test of kernels names one with a wrong bit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ext.doctor import kernels
from deepspeed_ext.doctor.findings import Level
from deepspeed_ext.doctor.place import Place

# What each operator writes, by position.
WRITTEN = {
    "loco_compress": (1, 3),
    "loco_decompress": (1,),
    "loco_difference": (2,),
    "loco_apply": (1,),
    "lossless_measure": (2,),
    "lossless_pack": (3,),
    "lossless_apply": (1,),
}


@pytest.fixture(scope="module", autouse=True)
def _kernels(kernels: bool) -> bool:
    return kernels


def operators(broken: str = "", position: int = 0) -> Any:
    """The operators; of one, the lowest bit of the last byte of what it writes is flipped."""
    found = {name: getattr(torch.ops.deepspeed_paro, name) for name in WRITTEN}
    right = found.get(broken)

    def wrong(*arguments: Any) -> None:
        assert right is not None
        right(*arguments)
        arguments[position].view(-1).view(torch.uint8)[-17 if broken == "lossless_pack" else -1] ^= 1

    return SimpleNamespace(**{**found, broken: wrong} if broken else found)


@pytest.mark.parametrize(("name", "position"), [(name, at) for name, places in WRITTEN.items() for at in places])
def test_a_kernel_with_a_wrong_bit_is_named(name: str, position: int) -> None:
    (found,) = kernels.differing(operators(name, position), "cpu")
    assert found.startswith(name)
    assert "error feedback" in found or position != 3 or name == "lossless_pack"
    answer = {"device": "cpu", "kernels": True, "wrong": [found]}
    good = {"device": "cpu", "kernels": True, "wrong": []}
    bad, fine = kernels.judge({0: good, 1: answer}, Place(0, 0, ["a", "b"]))
    assert bad.level == Level.WRONG and name in bad.found and "rank 1 (b)" in bad.found
    assert fine.level == Level.OK and "rank 0" in fine.found


def test_right_kernels_pass_and_missing_ones_are_named() -> None:
    assert kernels.differing(operators(), "cpu") == []
    (found,) = kernels.judge({0: {"device": "cpu", "kernels": False, "wrong": []}}, Place(0, 0, ["a"]))
    assert found.level == Level.LOOK and "plain PyTorch" in found.found
