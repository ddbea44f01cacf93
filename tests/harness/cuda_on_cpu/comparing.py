# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs an operator by the reference, by the kernels for the CPU, and emulated in several orders: bits are equal."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.loco import ops
from tests.harness.cuda_on_cpu.arguments import Placed
from tests.harness.cuda_on_cpu.emulator import OPERATORS, Emulator, Order, Variant, bits_of
from tests.harness.reference_codecs import REFERENCE

Operator = Callable[..., None]
# Each order of threads, each of blocks, each reciprocal.
VARIANTS = (
    Variant(),
    Variant(threads=Order.WARP_BY_WARP, rcp=-1),
    Variant(rcp=1),
    Variant(Order.REVERSED, Order.REVERSED),
    Variant(Order.SHUFFLED, Order.SHUFFLED, -1),
    Variant(Order.SHUFFLED, Order.SHUFFLED, 1),
    Variant(Order.REVERSED, Order.WARP_BY_WARP),
)


class Comparison:
    """Compares operators of an emulator; counts cases and runs. ``checked``: it knows of each access, so arguments are
    allowed to kernels for the time of a run. ``fail`` is called for a case that differs; it raises or records it."""

    def __init__(self, emulator: Emulator, checked: bool, fail: Callable[[str], None]) -> None:
        self.emulator = emulator
        self.cases: Counter[str] = Counter()
        self.runs = 0
        self._checked = checked
        self._fail = fail
        assert ops.load_kernels(), "the kernels for the CPU are compared as well"
        self._cpu: dict[str, Operator] = {name: getattr(torch.ops.deepspeed_paro, name).default for name in OPERATORS}

    def __call__(
        self,
        name: str,
        arguments: Sequence[Any],
        what: str,
        variants: Sequence[Variant] = VARIANTS,
        oracle: Operator | None = None,
    ) -> bool:
        """Compare one case in all variants, and return whether all bits are equal. ``Placed`` arguments are restored
        before each run, and left as the last one wrote them. ``oracle`` replaces a reference without an answer."""
        self.cases[name] += 1
        who = "the reference"
        placed = list({id(item): item for item in arguments if isinstance(item, Placed)}.values())
        before = [item.buffer.clone() for item in placed]
        plain = [item.view if isinstance(item, Placed) else item for item in arguments]
        try:
            (oracle or REFERENCE[name])(*plain)
            expected = [item.view.clone() for item in placed]
            for who, run in self._runs(name, variants, placed):  # noqa: B007  told if it fails
                for item, old in zip(placed, before, strict=True):
                    item.buffer.copy_(old)
                run(*plain)
                for item, old, new in zip(placed, before, expected, strict=True):
                    item.compare(old, new)
        except (AssertionError, RuntimeError) as error:
            self._fail(f"{name} {what}, {who}: {self.emulator.explained(str(error))[:700]}")
            return False
        return True

    def check(self, holds: bool, what: str) -> None:
        """Note a case that is compared elsewhere."""
        self.cases["other"] += 1
        if not holds:
            self._fail(what)

    def same(self, found: Tensor, expected: Tensor, what: str) -> None:
        """Compare two tensors bit by bit; all NaNs are equal."""
        different = (bits_of(found) != bits_of(expected)).sum()
        self.check(not different, f"{what}: {int(different)} of {found.numel()} differ")

    def _runs(self, name: str, variants: Sequence[Variant], placed: Sequence[Placed]) -> list[tuple[str, Operator]]:
        def emulated(variant: Variant) -> Operator:
            return lambda *arguments: self._emulated(name, variant, placed, arguments)

        return [("the CPU", self._cpu[name]), *((f"{variant}", emulated(variant)) for variant in variants)]

    def _emulated(self, name: str, variant: Variant, placed: Sequence[Placed], arguments: Sequence[Any]) -> None:
        self.runs += 1
        self.emulator.set(variant)
        for item in placed if self._checked else ():
            item.allow(self.emulator)
        try:
            self.emulator.kernels[name](*arguments)
        finally:
            self.emulator.forget()
        assert self.emulator.current_device() == 0, "the current device is another one afterwards"
        assert not self.emulator.counts().unchecked_launches, "nothing asked for the error of a launch"
