# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The strategy table against the published one, and its formulas against the definition of the moves."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from deepspeed_ext.strategy import (
    STRATEGIES,
    GroupSizes,
    ModelStates,
    Placement,
    Strategy,
    hyphenate,
    parse_strategy,
    plain_name,
    redistribution_volume,
)
from tests.harness.tiers import with_cases

pytestmark = pytest.mark.quick

# Bytes a rank receives in a step, as (intra, inter) in units of a M and b M with s micro-steps: full training in one
# dtype, so that parameters, gradients and updates are M bytes each. From the paper's tables (arXiv:2310.06003).
PUBLISHED: dict[str, tuple[int, Callable[[int], int], Callable[[int], int]]] = {
    "NNN": (1, lambda s: 2, lambda s: 2),
    "NNI": (1, lambda s: 2, lambda s: 2),
    "NNG": (1, lambda s: 2, lambda s: 2),
    "NII": (2, lambda s: s + 1, lambda s: 2),
    "NIG": (2, lambda s: s + 1, lambda s: 2),
    "NGG": (2, lambda s: s + 1, lambda s: s + 1),
    "INI": (3, lambda s: 2 * s + 1, lambda s: 2),
    "ING": (3, lambda s: 2 * s + 1, lambda s: 2),
    "III": (3, lambda s: 3 * s, lambda s: 2),
    "IIG": (3, lambda s: 3 * s, lambda s: 2),
    "IGG": (3, lambda s: 3 * s, lambda s: s + 1),
    "GNG": (3, lambda s: 2 * s + 1, lambda s: 2 * s + 1),
    "GIG": (3, lambda s: 3 * s, lambda s: 2 * s + 1),
    "GGG": (3, lambda s: 3 * s, lambda s: 3 * s),
}


def test_the_package_has_its_names_and_no_others() -> None:
    import deepspeed_ext

    assert deepspeed_ext.STRATEGIES is STRATEGIES and deepspeed_ext.Placement is Placement
    with pytest.raises(AttributeError, match="module 'deepspeed_ext' has no attribute 'nothing'"):
        _ = deepspeed_ext.nothing


def test_the_fourteen() -> None:
    assert list(STRATEGIES) == list(PUBLISHED)
    assert {name: row.stage for name, row in STRATEGIES.items()} == {n: row[0] for n, row in PUBLISHED.items()}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("n, m", [(6, 3), (64, 8), (8, 8), (8, 1), (1, 1)])
@pytest.mark.parametrize("s", [1, 4])
def test_bytes_are_the_published_ones(name: str, n: int, m: int, s: int) -> None:
    a, b, states = (m - 1) / m, (n // m - 1) / n, ModelStates.of(1000)
    volume = STRATEGIES[name].volume(GroupSizes(n, m), states, s)
    _, intra, inter = PUBLISHED[name]
    assert volume.intra == pytest.approx(intra(s) * a * 2000)
    assert volume.inter == pytest.approx(inter(s) * b * 2000)


def test_memory_and_bytes_of_the_papers_models() -> None:
    cluster = GroupSizes(64, 8)
    full = {n: row.memory(cluster, ModelStates.of(7 * 10**9)).total / 1e9 for n, row in STRATEGIES.items()}
    assert full["NIG"] == pytest.approx(17.06, abs=0.01) and full["IIG"] == pytest.approx(4.81, abs=0.01)
    few = ModelStates.of(65 * 10**9, trainable=65 * 10**9 * 3 // 1000)
    inter = {n: row.volume(cluster, few, 4).inter / 1e9 for n, row in STRATEGIES.items()}
    assert inter["GGG"] == pytest.approx(114, rel=0.01)
    assert inter["ING"] == inter["IIG"] == inter["III"] == pytest.approx(0.085, rel=0.01)


@settings(deadline=None)  # the machine may be busy
@given(some.integers(1, 12), some.integers(1, 12))
def test_gathering_over_two_hops_is_gathering_over_all(k: int, m: int) -> None:
    cluster = GroupSizes(k * m, m)
    stepwise = redistribution_volume(cluster, Placement.G, Placement.I, 1.0) + redistribution_volume(
        cluster, Placement.I, Placement.N, 1.0
    )
    whole = redistribution_volume(cluster, Placement.G, Placement.N, 1.0)
    assert (stepwise.intra, stepwise.inter) == pytest.approx((whole.intra, whole.inter))
    # What all ranks receive together is what they lack: n-1 n-ths each.
    assert whole.intra + whole.inter == pytest.approx((k * m - 1) / (k * m))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("n, m", [(4, 2), (12, 3), (8, 8), (8, 1), (1, 1)])
def test_whole_matrices_there_and_back_by_counting(name: str, n: int, m: int) -> None:
    """As many matrices as ranks that share them, each evenly divided and owned by another rank; elements received."""
    group_of, numel = (lambda rank: rank // m), 120
    shared = range(n) if name[2] == "G" else range(m)  # ranks; with os = I and N those of the first group
    received = {True: 0.0, False: 0.0}  # inside the group, between groups: by all of these ranks
    for owner in shared:
        for other in set(shared) - {owner}:
            inside = group_of(owner) == group_of(other)
            # A part to the owner, and its update back; or every rank has the matrix, and gets the update.
            received[inside] += numel if name[2] == "N" else 2 * numel / len(shared)
    found = STRATEGIES[name].exchange(GroupSizes(n, m), numel * len(shared))
    assert (found.intra, found.inter) == pytest.approx([received[inside] / len(shared) for inside in (True, False)])


def test_the_thirteen_others_say_why() -> None:
    others = ["".join(letters) for letters in itertools.product("NIG", repeat=3)]
    others = [name for name in others if name not in STRATEGIES]
    assert len(others) == 13
    for name in others:
        with pytest.raises(ValueError, match=f"'{name}'. {'-'.join(name)} is not a strategy: .* os = {name[2]} is co"):
            parse_strategy(name)


def test_names_with_hyphens() -> None:
    for name, strategy in STRATEGIES.items():
        assert parse_strategy(str(strategy)) is parse_strategy(name) is strategy
        assert (hyphenate(name), plain_name(str(strategy))) == (str(strategy), name)
    assert hyphenate("NIG + LoCo") == "N-I-G + LoCo" and plain_name("N-I-G, asynchronous") == "NIG, asynchronous"
    for other in ("ZeRO-2", "DDP", "NIGG", "NIG-2", "N--G", "fastest"):
        assert hyphenate(other) == plain_name(other) == other


@with_cases(
    "name", "nig", "n-i-g", "NI", "NIGG", "N--G", "N-IG", "NIG-", "N-I-G-G", "XYZ", "auto", "", None, 3, ["NIG"]
)
def test_unknown_names_get_the_list(name: object) -> None:
    with pytest.raises(ValueError, match="must be one of N-N-N, N-N-I, N-N-G, N-I-I, N-I-G, N-G-G, I-N-I") as error:
        parse_strategy(name)
    assert repr(name) in str(error.value)


@with_cases(
    "n, m, message",
    (4, 0, "at least 1, got 0"),
    (4, -2, "at least 1, got -2"),
    (4, 8, "8 with 4"),
    (6, 4, r"6 = 1 x 4 \+ 2.*\[1, 2, 3, 6\]"),
)
def test_group_sizes_that_do_not_fit(n: int, m: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupSizes(n, m)


def test_a_strategy_cannot_be_built_against_the_rule() -> None:
    with pytest.raises(ValueError, match="I-G-I is not a strategy"):
        Strategy(Placement.I, Placement.G, Placement.I)
