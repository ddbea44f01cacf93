# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Which matrices a parameter has for Muon, and what it costs to orthogonalize them. Pure."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deepspeed_ext.comm.spans import Span

_STEPS = 5  # of a Newton-Schulz iteration in DeepSpeed's ``muon_update``


class Matrices(NamedTuple):
    """Matrices of a parameter that are orthogonalized together: one, or some that are next to each other.

    Attributes:
        start: first element in the parameter.
        shape: what is given to ``muon_update``.
        heads: how many attention heads are in it, each of which is a matrix; None where it is not divided into heads.
        flops: of orthogonalizing them.
    """

    start: int
    shape: tuple[int, ...]
    heads: int | None
    flops: float

    @property
    def span(self) -> Span:
        """Their elements in the parameter."""
        return Span(self.start, math.prod(self.shape))


def newton_schulz_flops(rows: int, columns: int, method: str) -> float:
    """Return the FLOPs of orthogonalizing a matrix: of its products alone.

    With a for the shorter side and b for the longer one, a step of the standard iteration is X X', A A and B X:
    4 a a b + 2 a^3. That on the Gram matrix (``zeropower_via_gram_newtonschulz``) has four products of 2 a a b, one
    before the iteration, two at its restart and one after it, and 14 of 2 a^3. Square matrices take the standard one.
    """
    short, long = sorted((rows, columns))
    if method == "standard" or short == long:
        return float(_STEPS * (4 * short**2 * long + 2 * short**3))
    return float(8 * short**2 * long + 28 * short**3)


def matrices_of(shape: Sequence[int], heads: int | None, method: str, most: float) -> Iterator[Matrices]:
    """Yield a parameter's matrices, together where they cost no more than ``most``.

    As ``muon_update`` has it: the last two dimensions are a matrix, and those before count matrices (packed experts);
    but a kernel of four dimensions is one matrix, a row for each output channel, and a projection of attention heads
    may be one for each head. (It fails with kernels, whose update it does not give their shape again; here it is given
    the matrix.)

    Args:
        shape: of the parameter, of at least two dimensions.
        heads: into how many heads its rows are divided, if they are.
        method: "gram" or "standard".
        most: FLOPs.

    Raises:
        ValueError: heads do not divide the rows, or the parameter is no matrix of heads.
    """
    if heads is not None and (len(shape) != 2 or heads < 1 or shape[0] % heads):
        raise ValueError(
            f"Muon was to orthogonalize {heads} attention heads (muon_num_heads) of a parameter of shape "
            f"{tuple(shape)}: it needs two dimensions, of which the first is a multiple of the heads."
        )
    if not math.prod(shape):
        return
    if heads is not None or len(shape) not in (2, 4):
        count = heads or shape[0]
        rows = shape[0] // count if heads else math.prod(shape[1:-1])
        inner = 1 if heads else math.prod(shape[1:-2])
        flops = inner * newton_schulz_flops(rows // inner, shape[-1], method)
        together = count if count * flops <= most else max(1, int(most / flops))
        for first in range(0, count, together):
            number = min(together, count - first)
            taken = (number * rows, shape[-1]) if heads else (number, *shape[1:])
            yield Matrices(first * rows * shape[-1], taken, number if heads else None, number * flops)
        return
    matrix = shape[0], math.prod(shape[1:])
    yield Matrices(0, matrix, None, newton_schulz_flops(*matrix, method))
