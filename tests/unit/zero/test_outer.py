# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""An outer optimizer between groups trains as a copy of the model for each group, and ten lines, do."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ext.config.unsupported import UNSUPPORTED, refuse_unsupported
from deepspeed_ext.strategy import STRATEGIES
from tests.harness import outer_oracle
from tests.harness.training import SMALL, Job

ALL = ("NNI", "NII", "INI", "III")
JOB = Job(steps=7, zero=SMALL, empty=False)


def check(rows: list[Any], bound: float = 2e-6) -> None:
    for row in rows:
        assert row.weights < bound and row.losses < bound and row.anchors and row.together, row


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_it_is_ten_lines(ranks: Any, steps: int) -> None:
    for rows in ranks(4).run(outer_oracle.beside, ALL, JOB, {"steps": steps}, 2):
        check(rows)


ODD = replace(JOB, accumulation=3, optimizer="Adam", groups=2, frozen=(1,), skipped=((4, 0), (10, 2)), empty=True)
CASES = [
    (4, 2, ALL, JOB, {"steps": 2, "nesterov": False, "lr": 1.0}),
    (4, 2, ALL, ODD, {"steps": 3}),
    (6, 2, ("NII", "III"), ODD, {"steps": 2, "warmup_steps": 2}),  # three groups
    (4, 1, ("NNI", "III"), ODD, {"steps": 3}),  # four
    (4, 4, ("NII", "III"), ODD, {"steps": 2}),  # one
    (4, 2, ALL, ODD, {"steps": 4, "fragments": 2}),
    (4, 2, ALL, replace(JOB, steps=12), {"steps": 4, "fragments": 2, "delay": 1}),
    (6, 2, ("INI", "NII"), replace(JOB, steps=12), {"steps": 6, "fragments": 3, "delay": 1, "warmup_steps": 1}),
    (4, 2, ("NII", "III"), replace(JOB, steps=9), {"steps": 4, "delay": 3, "offload": "cpu"}),
    # One group skips the step after which a fragment leaves, and then the other one the step after which it is used.
    (4, 2, ALL, replace(JOB, overflow=((3, 1),)), {"steps": 4}),
    (4, 2, ALL, replace(JOB, steps=9, overflow=((3, 1), (6, 2))), {"steps": 4, "fragments": 2, "delay": 1}),
]


def named(value: object) -> str | None:
    """Name a case."""
    if isinstance(value, Job):
        return f"{value.optimizer} {value.steps}{' skipping' if value.overflow else ''}"
    return None if isinstance(value, int) else " ".join(map(str, value if isinstance(value, tuple) else [value]))


@pytest.mark.parametrize("n, group_size, names, job, outer", CASES, ids=named)
def test_it_is_ten_lines_in_all_cases(
    ranks: Any, n: int, group_size: int, names: tuple[str, ...], job: Job, outer: dict[str, Any]
) -> None:
    for rows in ranks(n).run(outer_oracle.beside, names, job, outer, group_size):
        check(rows)


def test_each_step_with_rate_1_is_the_strategy_alone(ranks: Any) -> None:
    job = replace(JOB, accumulation=2, clipping=0.0)
    outer = {"steps": 1, "lr": 1.0, "momentum": 0.0, "nesterov": False}
    for rows in ranks(4).run(outer_oracle.against, ALL, job, outer, None):
        assert all(row.weights < 2e-6 and row.anchors for row in rows), rows


@pytest.mark.parametrize("bits, bound", [(16, 0.01), (8, 0.02), (4, 0.2)])
def test_few_bits_are_close_and_groups_agree_to_the_bit(ranks: Any, kernels: bool, bits: int, bound: float) -> None:
    outer = {"steps": 2, "fragments": 2}
    for rows in ranks(4).run(outer_oracle.against, ALL, JOB, {**outer, "bits": bits}, outer):
        assert all(0 < row.weights < bound and row.anchors for row in rows), rows


ADAM = replace(JOB, optimizer="Adam")
OUTER = {"steps": 2, "fragments": 2}
KINDS = [  # what is trained, beside what, and how far apart they may be
    (replace(JOB, dtype="bf16"), JOB, 0.05),
    (replace(JOB, dtype="fp16", overflow=((3, 1),)), replace(JOB, overflow=((3, 1),), dtype="fp16"), 0.05),
    (replace(ADAM, zero={**SMALL, "offload_optimizer": {"device": "cpu"}}), ADAM, 2e-6),
    (replace(ADAM, zero={**SMALL, "offload_optimizer": {"device": "cpu"}}, dtype="bf16"), ADAM, 0.2),
]


@pytest.mark.parametrize("job, beside, bound", KINDS, ids=named)
def test_other_precisions_and_places(ranks: Any, job: Job, beside: Job, bound: float) -> None:
    for rows in ranks(4).run(outer_oracle.against, ALL, job, OUTER, OUTER, beside):
        assert all(row.weights < bound and row.anchors and row.finite for row in rows), rows
        skipped = [False] if job.dtype == "fp16" else []
        assert all([taken for taken in row.applied if not taken] == skipped for row in rows), rows


MUON = replace(JOB, optimizer="Muon", accumulation=2)


def test_strategies_are_alike_with_muon(ranks: Any) -> None:
    for rows in ranks(4).run(outer_oracle.alike, ALL, MUON, OUTER):
        assert max(rows.values()) < 1e-2, rows  # it iterates in bf16


@pytest.mark.parametrize("job", [MUON, replace(MUON, optimizer="Adam", dtype="bf16")], ids=named)
def test_before_the_first_outer_step_a_group_trains_as_if_alone(ranks: Any, job: Job) -> None:
    apart = ranks(4).run(outer_oracle.trained, ALL, job, 2, {"steps": 100})
    alone = ranks(2).run(outer_oracle.trained, ALL, job, 2, None)
    assert apart[:2] == alone and apart[2] == apart[3] != apart[0]


@pytest.mark.parametrize("zero_init", ["plain", "config"])
def test_a_model_that_was_built_sharded(ranks: Any, zero_init: str) -> None:
    job = replace(JOB, zero_init=zero_init)
    outer = {"steps": 1, "lr": 1.0, "momentum": 0.0, "nesterov": False}
    for rows in ranks(4).run(outer_oracle.against, ("INI", "III"), replace(job, clipping=0.0), outer, None):
        assert all(row.weights < 2e-6 and row.anchors for row in rows), rows


def set_case(names: tuple[str, ...]) -> list[Any]:
    """What becomes of weights that a script sets after two of three inner steps; and what a step of outer weights
    says."""
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param

    from tests.harness import snapshots, training

    def weights(engine: Any, model: Any) -> dict[str, torch.Tensor]:
        params = dict(model.named_parameters())
        with deepspeed.zero.GatheredParameters(list(params.values())):
            return {name: param.detach().clone() for name, param in params.items()}

    rows = []
    for name in names:
        outer = {"steps": 3, "lr": 1.0, "momentum": 0.0, "nesterov": False, "fragments": 2}
        engine, model = training.make_engine(JOB, training.placed(name, 2, **{outer_oracle.KEY: outer}))
        batches = snapshots.steps_of(JOB, 3)
        snapshots.run(engine, JOB, batches[:2])
        with engine.optimizer.outer.in_place():
            before = weights(engine, model)
            said = snapshots.error_of(engine.step)
        param = dict(model.named_parameters())["layers.1.weight"]
        value = torch.full(getattr(param, "ds_shape", param.shape), 0.25)
        safe_set_full_fp32_param(param, value)
        with engine.optimizer.outer.in_place():
            anchors = weights(engine, model)
        changed = [key for key in anchors if not torch.equal(anchors[key], before[key])]
        same = torch.equal(anchors["layers.1.weight"], value)
        snapshots.run(engine, JOB, batches[2:])
        after = weights(engine, model)
        with engine.optimizer.outer.in_place():
            agreed = torch.cat([one.flatten() for one in weights(engine, model).values()])
        together = training.replicas_equal(agreed)
        near = (after["layers.1.weight"] - value).abs().max().item()  # by a step, not back where it was
        rows.append((name, changed, same, together, near < 0.1, "deepspeed_ext.outer_weights" in said))
        engine.destroy()
    return rows


def test_what_a_script_sets_is_set_for_all(ranks: Any) -> None:
    expected = [(name, ["layers.1.weight"], True, True, True, True) for name in ALL]
    assert ranks(4).run(set_case, ALL) == [expected] * 4


def moved_case(names: tuple[str, ...]) -> list[Any]:
    """Whether training is the same when states move to the host and back after each step, and whether what a rank
    modifies is modified in all groups."""
    import deepspeed

    from tests.harness import snapshots, training

    rows, job = [], replace(JOB, optimizer="Muon")  # at stage 3 DeepSpeed moves no other one's states on a CPU
    for name in names:
        found = []
        for moving in (False, True):
            keys = training.placed(name, 2, **{outer_oracle.KEY: {"steps": 2, "fragments": 2, "bits": 4}})
            engine, model = training.make_engine(job, keys)
            for batch in snapshots.steps_of(job, 5):
                snapshots.run(engine, job, [batch])
                if moving:
                    engine.offload_states()
                    engine.reload_states()
            if name[0] != "N":
                params = list(model.parameters())
                with deepspeed.zero.GatheredParameters(params, modifier_rank=3):
                    for param in params if torch.distributed.get_rank() == 3 else ():
                        param.data.fill_(0.5)
            found.append(training.whole_weights(model))
            engine.destroy()
        rows.append((name, torch.equal(*found), name[0] == "N" or bool((found[0] == 0.5).all())))
    return rows


def test_states_move_and_a_rank_modifies_all_groups(ranks: Any, kernels: bool) -> None:
    assert ranks(4).run(moved_case, ALL) == [[(name, True, True) for name in ALL]] * 4


@pytest.mark.parametrize(
    "engine, said",
    [
        ({"pipeline_parallelism": True}, "stages of a pipeline .* and paro_outer_optimizer lets .* Remove paro_outer"),
        ({"has_moe_layers": True}, "ranks with the same experts may be in one group alone.* Remove paro_outer"),
        ({"sequence_parallel_size": 4}, "4 ranks share a sequence, and groups have 2, .* Set .*paro_group_size to a"),
    ],
    ids=str,
)
def test_what_groups_that_train_apart_cannot_have_is_refused(engine: dict[str, Any], said: str) -> None:
    kinds = {"pipeline_parallelism": False, "has_moe_layers": False, "sequence_parallel_size": 1}
    for section, refused in (({}, True), (None, False)):
        zero = SimpleNamespace(paro_outer_optimizer=section, paro_group_size=2)
        config = SimpleNamespace(zero_config=zero, _param_dict={"zero_optimization": {}})
        given = SimpleNamespace(**kinds | engine, _config=config, module=torch.nn.Module())
        with pytest.raises(ValueError, match=said) if refused else nullcontext():
            refuse_unsupported(UNSUPPORTED, STRATEGIES["III"], given, None)
