# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Which matrices a parameter has for Muon, and what they cost."""

import math

import pytest

from deepspeed_ext.zero.matrices import matrices_of, newton_schulz_flops


@pytest.mark.parametrize(
    "shape, heads, wanted",
    [
        ((6, 4), None, [(0, (6, 4), None)]),
        ((6, 3, 2, 2), None, [(0, (6, 12), None)]),  # a kernel is one matrix
        ((5, 6, 4), None, [(0, (2, 6, 4), None), (48, (2, 6, 4), None), (96, (1, 6, 4), None)]),  # packed experts
        ((12, 4), 3, [(0, (8, 4), 2), (32, (4, 4), 1)]),
    ],
)
def test_a_parameter_is_divided_between_matrices(
    shape: tuple[int, ...], heads: int | None, wanted: list[tuple[int, tuple[int, ...], int | None]]
) -> None:
    each = newton_schulz_flops(shape[0] // heads if heads else shape[-2], shape[-1], "gram")
    found = list(matrices_of(shape, heads, "gram", 2.5 * each))
    assert [(one.start, one.shape, one.heads) for one in found] == wanted
    assert sum(one.span.numel for one in found) == math.prod(shape)
    (together,) = matrices_of(shape, heads, "gram", math.inf)
    assert together.flops == pytest.approx(sum(one.flops for one in found))


def test_flops_are_those_of_the_products() -> None:
    assert newton_schulz_flops(10, 30, "standard") == 5 * (4 * 100 * 30 + 2 * 1000)
    assert newton_schulz_flops(30, 10, "gram") == 8 * 100 * 30 + 28 * 1000
    assert newton_schulz_flops(10, 10, "gram") == newton_schulz_flops(10, 10, "standard")


@pytest.mark.parametrize("shape, heads", [((13, 8), 3), ((12, 4, 8), 3), ((12, 4), 0)])
def test_heads_that_do_not_divide_a_matrix_are_refused(shape: tuple[int, ...], heads: int) -> None:
    with pytest.raises(
        ValueError, match=rf"orthogonalize {heads} attention heads \(muon_num_heads\) of a parameter of"
    ):
        list(matrices_of(shape, heads, "gram", math.inf))
    assert not list(matrices_of((0, 4), None, "gram", math.inf))
