# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Our keys are accepted in every form in which DeepSpeed takes a configuration, and mean what the README says."""

import base64
import copy
import json
import pickle
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.config import DeepSpeedConfig

from deepspeed_ext.config.model import ParoConfig
from deepspeed_ext.config.section import active_strategy
from deepspeed_ext.zero.stage3 import Stage3Optimizer
from tests.harness import logs, training
from tests.harness.config_sections import CPU, IIG, OFFLOADING, config

pytestmark = pytest.mark.quick

MICS: dict[str, Any] = {"mics_shard_size": 2}
GROUP_SIZE = "paro_group_size"


def parsed(sections: list[dict[str, Any]], form: str, folder: str) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Parse sections in a form that DeepSpeed takes; return each class, our fields, and the raw section."""
    results = []
    for number, section in enumerate(sections):
        text = json.dumps(config(**section))
        path = Path(folder, f"{number}.json")
        forms: dict[str, Any] = {"dict": json.loads(text), "file": str(path)}
        parsed = DeepSpeedConfig(forms.get(form, base64.urlsafe_b64encode(text.encode()).decode()))
        fields = {
            key: getattr(parsed.zero_config, key, "absent")
            for key in ("stage", "overlap_comm", *ParoConfig.model_fields)
        }
        results.append((type(parsed.zero_config).__name__, fields, parsed._param_dict["zero_optimization"]))
    return results


@pytest.mark.parametrize("form", ["dict", "file", "base64"])
def test_each_form_of_config(ranks: Any, tmp_path: Path, form: str) -> None:
    nig, *mics = sections = [{"paro_strategy": "NIG", "paro_group_size": 2}, MICS, {**MICS, "stage": 3}]
    for number, section in enumerate(sections):
        (tmp_path / f"{number}.json").write_text(json.dumps(config(**section)), encoding="utf-8")
    fields = {"stage": 2, "overlap_comm": False} | {key: row.default for key, row in ParoConfig.model_fields.items()}
    for results in ranks(2).run(parsed, sections, form, str(tmp_path)):
        assert results[0] == ("ParoZeroConfig", fields | nig, {"stage": 2, **nig})
        for section, (kind, of_mics, raw) in zip(mics, results[1:], strict=True):
            assert (kind, of_mics["stage"], of_mics["paro_strategy"]) == ("ParoZeroConfig", 3, "III")
            assert of_mics["paro_group_size"] == 2
            assert raw == {**section, "stage": 3}  # what the user wrote, and what frameworks read


# Sections, and the strategy and stage that they mean; no strategy for DeepSpeed's own class.
MEANT: list[tuple[dict[str, Any], str | None, int]] = [
    ({"stage": 2}, None, 2),
    ({"stage": 3, "zero_quantized_gradients": True}, None, 3),
    ({"mics_shard_size": -1, "mics_hierarchical_params_gather": False, "stage": 3}, None, 3),
    ({"mics_shard_size": -1, **IIG}, "IIG", 3),
    *(({"paro_strategy": name, "paro_group_size": 2, "offload_param": CPU}, name, 3) for name in OFFLOADING),
    ({"stage": 1, "paro_quantized_updates": {}}, "NNG", 1),
    ({"stage": 2, "paro_quantized_updates": {"bits": 8}, "zeropp_loco_param": {}}, "NGG", 2),
    ({**MICS, "paro_quantized_updates": {}}, "III", 3),
    ({"stage": 1, "zeropp_loco_param": {}}, "NNG", 1),
    ({"stage": 2, "zeropp_loco_param": {"bits": 8}, "zero_quantized_gradients": True}, "NGG", 2),
    ({"stage": 3, "zeropp_loco_param": {"err_beta": 0}}, "GGG", 3),
    ({"paro_strategy": "N-I-G"}, "NIG", 2),
    ({"paro_strategy": "NIG", "zeropp_loco_param": {"reset_T": 512}}, "NIG", 2),
    ({**MICS, "zeropp_loco_param": {}}, "III", 3),
    ({"paro_strategy": "IIG", "zero_quantized_gradients": True}, "IIG", 3),
    ({"paro_strategy": "IIG", "zero_quantized_gradients": False}, "IIG", 3),
]


def test_sections_mean_a_strategy_or_a_plain_stage(ranks: Any) -> None:
    for results in ranks(2).run(parsed, [section for section, *_ in MEANT], "dict", ""):
        for (section, strategy, stage), (kind, fields, raw) in zip(MEANT, results, strict=True):
            assert kind == ("ParoZeroConfig" if strategy else "DeepSpeedZeroConfig"), section
            assert (fields["paro_strategy"], fields["stage"]) == (strategy or "absent", stage), section
            if strategy:
                updates = fields["paro_quantized_updates"]
                assert (updates and updates.as_dict(only_set=True)) == section.get("paro_quantized_updates"), section
                assert fields["paro_group_size"] == (2 if MICS.items() <= section.items() else section.get(GROUP_SIZE))
            assert raw == {**section, "stage": stage}


def test_the_callers_dict_says_the_stage() -> None:
    """Frameworks read it there; and the next engine may be given the same dict with another strategy, or with none."""
    zero: dict[str, Any] = {}
    for name, stage in (("NNG", 1), ("IIG", 3), ("NIG", 2)):
        zero["paro_strategy"] = name
        DeepSpeedConfig({**config(), "zero_optimization": zero})
        assert zero["stage"] == stage
    assert b"deepspeed_ext" not in pickle.dumps(zero)  # a checkpoint holds it, and is read without the package
    del zero["paro_strategy"]
    DeepSpeedConfig({**config(), "zero_optimization": zero})
    assert "stage" not in zero
    for other, stage in (
        ({"mics_shard_size": 1}, 3),
        ({"paro_strategy": "IIG", "stage": 0}, 0),
        ({"paro_strategy": "fastest"}, None),
    ):
        DeepSpeedConfig({**config(), "zero_optimization": other})
        assert other.get("stage") == stage


def test_a_stage_left_out_is_warned_of_if_the_model_is_whole(ranks: Any) -> None:
    warnings = ranks(1).run(warnings_case)[0]
    assert [len(results) for results in warnings] == [1, 0, 0, 0], warnings
    assert "I-I-G shards parameters" in warnings[0][0] and "Set zero_optimization.stage to 3." in warnings[0][0]


def warnings_case() -> list[list[str]]:
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


def test_copies_keep_the_strategy() -> None:
    parsed = DeepSpeedConfig(config(paro_strategy="IIG"))
    off = DeepSpeedConfig(config(paro_strategy="IIG", stage=0))
    results = [parsed, copy.copy(parsed), copy.deepcopy(parsed), copy.copy(parsed)]
    results[3].zero_config = pickle.loads(pickle.dumps(parsed.zero_config))
    assert [active_strategy(parsed_config).name for parsed_config in results] == ["IIG"] * 4
    assert active_strategy(off) is None


def test_stage_0_is_a_no_op(ranks: Any) -> None:
    assert set(ranks(2).run(stage_0_case)) == {"DeepSpeedEngine"}


def stage_0_case() -> str:
    """A reference model as some trainers make it: our key is left in, the stage is set to 0, and no optimizer."""
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(3, 3), config=config(paro_strategy="NIG", stage=0))
    assert engine.optimizer is None
    engine.destroy()
    return type(engine).__name__


def test_hierarchical_gathers_of_mics_are_implied(ranks: Any) -> None:
    """The first rank logs that a key has no effect of its own."""
    implied = ": zero_optimization.mics_hierarchical_params_gather is implied"
    for rank, (without, lines) in enumerate(ranks(2).run(mics_log_case)):
        assert not without and len(lines) == (rank == 0)
        assert all(level == "INFO" and implied in text and logs.is_ours(text) for level, text in lines)


def mics_log_case() -> list[list[tuple[str, str]]]:
    """Return the log lines of parsing MiCS's keys, without and with hierarchical gathers."""
    results = []
    for hierarchical in (False, True):
        with logs.logged() as lines:
            zero = DeepSpeedConfig(config(**MICS, mics_hierarchical_params_gather=hierarchical)).zero_config
        assert (zero.paro_strategy, zero.paro_group_size) == ("III", 2)
        results.append([line for line in lines if "mics" in line[1]])
    return results


def test_engines_and_zero_init_cut_for_mics(ranks: Any, tmp_path: Path) -> None:
    """Ranks and elements of the shards of parameters of 36 elements, of a model as it is and of one in zero.Init."""
    ds_config = {**config(**MICS), "zero_allow_untested_optimizer": True}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ds_config), encoding="utf-8")
    for zero_init, shards in ranks(4).each(mics_shards_case, (False, True), ds_config, str(path)):
        assert shards == [(2, 18)] * 2, zero_init


def mics_shards_case(zero_init: bool, ds_config: dict[str, Any], path: str) -> list[tuple[int, int]]:
    with deepspeed.zero.Init(config_dict_or_path=path, enabled=zero_init):
        model = torch.nn.Sequential(torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 6, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
    assert isinstance(engine.optimizer, Stage3Optimizer)
    return [(dist.get_world_size(p.ds_process_group), p.ds_tensor.numel()) for p in model.parameters()]
