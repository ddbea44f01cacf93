# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Our keys are accepted in every form in which DeepSpeed takes a configuration, and mean what the README says."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.config.keys import KEYS
from tests.harness.logs import is_ours
from tests.harness.sections import CPU, IIG, OFFLOADING, config

pytestmark = pytest.mark.quick


def parsed_zero_config(form: str, section: dict[str, Any], path: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Parse in one of the forms that DeepSpeed takes; class name, our fields, and the raw section as it is kept."""
    from deepspeed.runtime.config import DeepSpeedConfig

    text = json.dumps(config(**section))
    given: Any = {"dict": json.loads(text), "file": path, "base64": base64.urlsafe_b64encode(text.encode()).decode()}
    parsed = DeepSpeedConfig(given[form])
    zero = parsed.zero_config
    fields = {key: getattr(zero, key, "absent") for key in ("stage", "overlap_comm", *KEYS)}
    return type(zero).__name__, fields, parsed._param_dict["zero_optimization"]


@pytest.mark.parametrize("form", ["dict", "file", "base64"])
def test_each_form_of_config(ranks: Any, tmp_path: Path, form: str) -> None:
    section = {"paro_strategy": "NIG", "paro_group_size": 2}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config(**section)), encoding="utf-8")
    for answer in ranks(4).run(parsed_zero_config, form, section, str(file)):
        fields = {"stage": 2, "overlap_comm": False, "paro_overlap_updates": False, "paro_quantized_updates": None}
        fields |= {"paro_outer_optimizer": None, "paro_parameter_cache_bytes": 0}
        fields |= section
        assert answer == ("ParoZeroConfig", fields, {"stage": 2, **section})


def test_the_callers_dict_says_the_stage(ranks: Any) -> None:
    """Frameworks read it there; and the next engine may be given the same dict with another strategy, or with none."""
    stages, others, saved = ranks(1).run(implied_stages_case)[0]
    assert stages == [1, 3, 2, "absent"] and others == [3, 0, "absent"]
    assert b"deepspeed_ext" not in saved  # a checkpoint holds the configuration, and is read without us


def implied_stages_case() -> tuple[list[Any], list[Any], bytes]:
    """The stage in a section that was parsed with one strategy after the other; in others; and one as it is saved."""
    import pickle

    from deepspeed.runtime.config import DeepSpeedConfig

    zero: dict[str, Any] = {}
    stages: list[Any] = []
    for name in ("NNG", "IIG", "NIG"):
        zero["paro_strategy"] = name
        DeepSpeedConfig({**config(), "zero_optimization": zero})
        stages.append(zero["stage"])
    saved = pickle.dumps(zero)
    del zero["paro_strategy"]
    DeepSpeedConfig({**config(), "zero_optimization": zero})
    stages.append(zero.get("stage", "absent"))
    others = []
    for other in ({"mics_shard_size": 1}, {"paro_strategy": "IIG", "stage": 0}, {"paro_strategy": "fastest"}):
        DeepSpeedConfig({**config(), "zero_optimization": other})
        others.append(other.get("stage", "absent"))
    return stages, others, saved


def test_a_stage_left_out_is_warned_of_where_the_model_was_made_whole(ranks: Any) -> None:
    warnings = ranks(1).run(warnings_case)[0]
    assert [len(found) for found in warnings] == [1, 0, 0, 0], warnings
    assert "IIG shards parameters" in warnings[0][0] and "Set zero_optimization.stage to 3." in warnings[0][0]


def warnings_case() -> list[list[str]]:
    """What engines warn of zero.Init."""
    from tests.harness import logs, training

    def warnings_of(zero_init: str | None, **zero: Any) -> list[str]:
        with logs.logged() as lines:
            engine, _ = training.make_engine(training.Job(empty=False, zero_init=zero_init), zero)
        engine.destroy()
        return [line for level, line in lines if level == "WARNING" and "zero.Init" in line]

    return [
        warnings_of(None, paro_strategy="IIG"),
        warnings_of(None, paro_strategy="IIG", stage=3),
        warnings_of("config", paro_strategy="IIG"),
        warnings_of(None, paro_strategy="NIG"),
    ]


def test_the_strategy_is_parsed_once_and_kept_by_copies(ranks: Any) -> None:
    assert ranks(1).run(copies_case) == [["IIG"] * 4 + ["None"]]


def copies_case() -> list[str]:
    """The strategies of a configuration, of its copies, and at stage 0, with every further parse forbidden."""
    import copy
    import pickle
    from unittest import mock

    from deepspeed.runtime.config import DeepSpeedConfig

    from deepspeed_ext.config import section, validate

    parsed = DeepSpeedConfig(config(paro_strategy="IIG"))
    off = DeepSpeedConfig(config(paro_strategy="IIG", stage=0))
    with mock.patch.object(validate, "parse_strategy", side_effect=AssertionError("parsed again")):
        found = [parsed, copy.copy(parsed), copy.deepcopy(parsed), copy.copy(parsed), off]
        found[3].zero_config = pickle.loads(pickle.dumps(parsed.zero_config))
        return [getattr(section.active_strategy(one), "name", "None") for one in found]


def test_off_means_the_exact_upstream_class(ranks: Any) -> None:
    name, fields, _ = ranks(4).run(parsed_zero_config, "dict", {"stage": 2}, "")[0]
    assert name == "DeepSpeedZeroConfig" and fields["paro_strategy"] == "absent"


def test_stage_0_is_a_no_op(ranks: Any) -> None:
    assert set(ranks(4).run(stage_0_case)) == {"DeepSpeedEngine"}


def stage_0_case() -> str:
    """A reference model as some trainers make it: our key is left in, the stage is set to 0, and no optimizer."""
    import deepspeed
    import torch

    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(3, 3), config=config(paro_strategy="NIG", stage=0))
    assert engine.optimizer is None
    engine.destroy()
    return type(engine).__name__


@pytest.mark.parametrize("name", OFFLOADING)
def test_parameters_may_be_offloaded_where_they_are_sharded(ranks: Any, name: str) -> None:
    section = {"paro_strategy": name, "paro_group_size": 2, "offload_param": CPU}
    for kind, fields, _ in ranks(4).run(parsed_zero_config, "dict", section, ""):
        assert (kind, fields["stage"]) == ("ParoZeroConfig", 3)


@pytest.mark.parametrize("form", ["dict", "file", "base64"])
@pytest.mark.parametrize("stage", [{}, {"stage": 3}], ids=["no stage", "stage 3"])
def test_mics_shard_size_is_iii_in_groups_of_that_size(
    ranks: Any, tmp_path: Path, form: str, stage: dict[str, int]
) -> None:
    section = {"mics_shard_size": 2, **stage}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config(**section)), encoding="utf-8")
    for kind, fields, raw in ranks(4).run(parsed_zero_config, form, section, str(file)):
        assert kind == "ParoZeroConfig"
        assert (fields["stage"], fields["paro_strategy"], fields["paro_group_size"]) == (3, "III", 2)
        assert raw == {**section, "stage": 3}  # what the user wrote, and what frameworks read


def test_mics_shard_size_minus_one_is_off(ranks: Any) -> None:
    off = {"mics_shard_size": -1, "mics_hierarchical_params_gather": False, "stage": 3}
    for kind, fields, raw in ranks(4).run(parsed_zero_config, "dict", off, ""):
        assert (kind, fields["stage"], fields["paro_strategy"], raw) == ("DeepSpeedZeroConfig", 3, "absent", off)
    beside = {"mics_shard_size": -1, **IIG}
    for kind, fields, _ in ranks(4).run(parsed_zero_config, "dict", beside, ""):
        assert (kind, fields["paro_strategy"], fields["paro_group_size"]) == ("ParoZeroConfig", "IIG", 2)


@pytest.mark.parametrize(
    ("section", "strategy", "stage"),
    [
        ({"stage": 1, "paro_quantized_updates": {}}, "NNG", 1),
        ({"stage": 2, "paro_quantized_updates": {"bits": 8}, "zeropp_loco_param": {}}, "NGG", 2),
        ({"mics_shard_size": 2, "paro_quantized_updates": {}}, "III", 3),
        ({"stage": 1, "zeropp_loco_param": {}}, "NNG", 1),
        ({"stage": 2, "zeropp_loco_param": {"bits": 8}, "zero_quantized_gradients": True}, "NGG", 2),
        ({"stage": 3, "zeropp_loco_param": {"err_beta": 0}}, "GGG", 3),
        ({"paro_strategy": "NIG", "zeropp_loco_param": {"reset_T": 512}}, "NIG", 2),
        ({"mics_shard_size": 2, "zeropp_loco_param": {}}, "III", 3),
        ({"paro_strategy": "IIG", "zero_quantized_gradients": True}, "IIG", 3),
        ({"paro_strategy": "IIG", "zero_quantized_gradients": False}, "IIG", 3),
    ],
)
def test_few_bits_are_a_strategy_of_the_stage_or_stand_beside_one(
    ranks: Any, section: dict[str, Any], strategy: str, stage: int
) -> None:
    for kind, fields, raw in ranks(4).run(parsed_zero_config, "dict", section, ""):
        assert (kind, fields["paro_strategy"], fields["stage"]) == ("ParoZeroConfig", strategy, stage)
        assert fields["paro_quantized_updates"] == section.get("paro_quantized_updates")
        assert raw == {**section, "stage": stage}


def test_stage_3_with_quantized_gradients_alone_is_deepspeeds(ranks: Any) -> None:
    section = {"stage": 3, "zero_quantized_gradients": True}
    assert ranks(4).run(parsed_zero_config, "dict", section, "")[0][0] == "DeepSpeedZeroConfig"


@pytest.mark.parametrize("hierarchical", [False, True])
def test_hierarchical_gathers_of_mics_are_implied(ranks: Any, hierarchical: bool) -> None:
    implied = ": zero_optimization.mics_hierarchical_params_gather is implied"
    for rank, (messages, fields) in enumerate(ranks(4).run(mics_log_case, hierarchical)):
        assert fields == ("III", 2)
        found = [(level, text) for level, text in messages if "mics" in text]
        assert len(found) == (1 if hierarchical and rank == 0 else 0), (rank, found)
        assert all(level == "INFO" and implied in text and is_ours(text) for level, text in found)


def mics_log_case(hierarchical: bool) -> tuple[list[tuple[str, str]], tuple[str, int]]:
    """What parsing MiCS's keys writes to DeepSpeed's log, and our fields."""
    from deepspeed.runtime.config import DeepSpeedConfig

    from tests.harness.logs import logged

    with logged() as lines:
        given = config(mics_shard_size=2, mics_hierarchical_params_gather=hierarchical)
        zero = DeepSpeedConfig(given).zero_config
    return lines, (zero.paro_strategy, zero.paro_group_size)


def test_mics_trains_as_iii_does_and_zero_init_cuts_for_it(ranks: Any, tmp_path: Path) -> None:
    for rows, shards in ranks(4).run(mics_training_case, str(tmp_path / "ds.json")):
        assert rows[:2] == [("Stage3Optimizer", True)] * 2, rows
        assert rows[2] == ("DeepSpeedZeroOptimizer_Stage3", True), rows
        assert shards == {"initialize": [(2, 18)] * 2, "zero.Init": [(2, 18)] * 2}


def mics_training_case(path: str) -> tuple[list[tuple[str, bool]], dict[str, list[tuple[int, int]]]]:
    """Weights of MiCS against III, given as a dict and as a file, and of size -1 against stock, to the bit.

    Also ranks and elements of the shards of two parameters of 36 elements, in an engine of a model as it is and of
    one that was made in zero.Init.
    """
    import deepspeed
    import torch
    from deepspeed import comm as dist

    from deepspeed_ext.zero.stage3 import Stage3Optimizer
    from tests.harness import training

    job = training.Job(accumulation=2, steps=3, empty=False)
    kinds: list[str] = []

    def weights(zero: dict[str, Any]) -> torch.Tensor:
        return training.train(job, zero, look=lambda e: kinds.append(type(e.optimizer).__name__)).weights

    stock = weights({"stage": 3})
    iii = weights({"paro_strategy": "III", "paro_group_size": 2})
    kinds.clear()
    same = [
        torch.equal(weights({"mics_shard_size": 2}), iii),
        torch.equal(weights({"mics_shard_size": 2, "stage": 3, "mics_hierarchical_params_gather": True}), iii),
        torch.equal(weights({"mics_shard_size": -1, "stage": 3}), stock),
    ]
    given = {**config(mics_shard_size=2), "zero_allow_untested_optimizer": True}
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(given), encoding="utf-8")
    dist.barrier()
    shards = {}
    for how in ("initialize", "zero.Init"):
        with deepspeed.zero.Init(config_dict_or_path=path, enabled=how == "zero.Init"):
            model = torch.nn.Sequential(torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 6, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=given)
        assert isinstance(engine.optimizer, Stage3Optimizer)
        shards[how] = [(dist.get_world_size(p.ds_process_group), p.ds_tensor.numel()) for p in model.parameters()]
        engine.destroy()
    return list(zip(kinds, same, strict=True)), shards
