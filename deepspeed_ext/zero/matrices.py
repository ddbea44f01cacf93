# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A parameter's matrices for Muon, and the cost of orthogonalizing them. Pure."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deepspeed_ext.comm.spans import Span

_STEPS = 5  # steps of a Newton-Schulz iteration in DeepSpeed's ``muon_update``


class Matrices(NamedTuple):
    """One or several adjacent matrices of a parameter that are orthogonalized together.

    Attributes:
        start: first element in the parameter.
        shape: shape of the tensor that is passed to ``muon_update``.
        heads: number of attention heads, each of which is a matrix; None without division into heads.
        flops: FLOPs of orthogonalizing them.
    """

    start: int
    shape: tuple[int, ...]
    heads: int | None
    flops: float

    @property
    def span(self) -> Span:
        """Elements of the matrices in the parameter."""
        return Span(self.start, math.prod(self.shape))


def newton_schulz_flops(rows: int, columns: int, method: str) -> float:
    """Return the FLOPs of orthogonalizing a matrix, of matrix products only.

    With a for the shorter side and b for the longer one, a step of the standard iteration computes X X', A A, and B X:
    4 a a b + 2 a^3. The iteration on the Gram matrix (``zeropower_via_gram_newtonschulz``) has four products of 2 a a
    b, one before it, two at its restart, and one after it, and 14 of 2 a^3. Square matrices use the standard one.
    """
    short, long = sorted((rows, columns))
    if method == "standard" or short == long:
        return float(_STEPS * (4 * short**2 * long + 2 * short**3))
    return float(8 * short**2 * long + 28 * short**3)


def matrices_of(shape: Sequence[int], heads: int | None, method: str, max_flops: float) -> Iterator[Matrices]:
    """Yield a parameter's matrices, together if they cost at most ``max_flops``.

    As in ``muon_update``, the last two dimensions are a matrix, and earlier dimensions count matrices (packed
    experts). A kernel of four dimensions is one matrix, with a row for each output channel, and a projection of
    attention heads may have a matrix for each head. (``muon_update`` fails with kernels, because it does not restore
    the shape of their update; here it is passed the matrix.)

    Args:
        shape: shape of the parameter, with at least two dimensions.
        heads: number of heads into which its rows are divided, if any.
        method: "gram" or "standard".
        max_flops: maximum number of FLOPs.

    Raises:
        ValueError: heads do not divide the rows, or the parameter does not have two dimensions.
    """
    if heads is not None and (len(shape) != 2 or heads < 1 or shape[0] % heads):
        raise ValueError(
            f"muon_num_heads is {heads} for a parameter of shape {tuple(shape)}: expected two dimensions, the first a "
            f"multiple of muon_num_heads."
        )
    if not math.prod(shape):
        return
    if heads is not None or len(shape) not in (2, 4):
        count = heads or shape[0]
        rows = shape[0] // count if heads else math.prod(shape[1:-1])
        inner = 1 if heads else math.prod(shape[1:-2])
        flops = inner * newton_schulz_flops(rows // inner, shape[-1], method)
        per_part = count if count * flops <= max_flops else max(1, int(max_flops / flops))
        for first in range(0, count, per_part):
            number = min(per_part, count - first)
            part_shape = (number * rows, shape[-1]) if heads else (number, *shape[1:])
            yield Matrices(first * rows * shape[-1], part_shape, number if heads else None, number * flops)
        return
    matrix = shape[0], math.prod(shape[1:])
    yield Matrices(0, matrix, None, newton_schulz_flops(*matrix, method))
