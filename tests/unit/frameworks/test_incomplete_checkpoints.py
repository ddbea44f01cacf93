# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Frameworks resume from complete checkpoints and keep the last of them, though saves end after they have returned."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ext.checkpoint import frameworks
from tests.harness.tiers import with_cases

NEWEST, COMPLETE, RUNNING, WEIGHTS_ONLY, NO_STATE = "newest", "complete", "running", "weights only", "no state"
FILES = {
    COMPLETE: ("trainer_state.json", "rng_state_0.pth", "latest"),
    RUNNING: ("trainer_state.json", "rng_state_0.pth"),
    WEIGHTS_ONLY: ("trainer_state.json",),
    NO_STATE: ("latest", "rng_state_0.pth"),
}


def make(folder: Path, kinds: list[str], name: str = "checkpoint-") -> Path:
    """Checkpoints 2, 4, ... of these kinds, and a folder that is no checkpoint."""
    (folder / "runs").mkdir(parents=True)
    (folder / f"{name}99").touch()
    for number, kind in enumerate(kinds):
        checkpoint = folder / f"{name}{2 * number + 2}"
        checkpoint.mkdir()
        for file in FILES[kind]:
            (checkpoint / file).touch()
    return folder


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """``zero_optimization`` as transformers has it, with a strategy."""
    section: dict[str, Any] = {"paro_strategy": "NIG"}
    module = SimpleNamespace(deepspeed_config=lambda: {"zero_optimization": section})
    monkeypatch.setitem(sys.modules, "transformers.integrations.deepspeed", module)
    return section


@pytest.mark.quick
@with_cases(
    "kinds, step",
    ([], None),
    ([RUNNING], None),
    ([COMPLETE] * 6, 12),
    ([COMPLETE, COMPLETE, RUNNING], 4),
    ([COMPLETE, RUNNING, NO_STATE], 2),
    ([COMPLETE, RUNNING, COMPLETE, RUNNING], 6),
    ([COMPLETE, WEIGHTS_ONLY], 4),
)
def test_the_newest_complete_checkpoint_is_resumed(
    configured: dict[str, Any], tmp_path: Path, kinds: list[str], step: int | None
) -> None:
    folder = str(make(tmp_path / "run", kinds))
    expected = None if step is None else os.path.join(folder, f"checkpoint-{step}")
    assert frameworks.last_checkpoint(lambda found: NEWEST, folder) == expected
    configured.clear()  # without a key it is what transformers finds
    assert frameworks.last_checkpoint(lambda found: NEWEST, folder) == NEWEST


@pytest.mark.quick
@with_cases(
    "kinds, limit, best, expected",
    ([COMPLETE, RUNNING], 1, None, 2),
    ([COMPLETE, RUNNING], 1, "checkpoint-2", 3),
    ([COMPLETE, COMPLETE, RUNNING], 2, None, 3),
    ([COMPLETE, RUNNING, RUNNING], 1, None, 3),
    ([COMPLETE, COMPLETE], 1, None, 1),
    ([WEIGHTS_ONLY, WEIGHTS_ONLY], 1, None, 1),
    ([COMPLETE, RUNNING], None, None, None),
    ([COMPLETE, RUNNING], 0, None, 0),
)
def test_a_limit_counts_complete_checkpoints(
    configured: dict[str, Any], tmp_path: Path, kinds: list[str], limit: int | None, best: str | None, expected: Any
) -> None:
    folder = str(make(tmp_path / "run", kinds))
    state, arguments = SimpleNamespace(best_model_checkpoint=best), SimpleNamespace(save_total_limit=limit)
    trainer = SimpleNamespace(args=arguments, state=state)
    limits: list[Any] = []
    for _ in range(2):  # the second time without a key
        frameworks.rotate_checkpoints(lambda _, limit, *rest: limits.append(limit), folder, limit, best)
        frameworks.rotate_checkpoints_of(
            lambda trainer, *rest: limits.append(trainer.args.save_total_limit), trainer, True, folder
        )
        configured.clear()
    assert limits == [expected, expected, limit, limit] and arguments.save_total_limit == limit


@pytest.mark.quick
def test_accelerate_loads_the_newest_complete_state(tmp_path: Path) -> None:
    make(tmp_path / "checkpoints", [COMPLETE, COMPLETE, RUNNING], "checkpoint_")
    calls: list[Any] = []
    files = SimpleNamespace(async_saves=None, finish=lambda: calls.append("finish"))
    accelerator = SimpleNamespace(
        project_dir=str(tmp_path),
        project_configuration=SimpleNamespace(automatic_checkpoint_naming=True),
        _models=[SimpleNamespace(checkpoint_engine=files)],
    )

    def record(_: Any, folder: str | None = None, *rest: Any) -> None:
        calls.append(folder and Path(folder).name)

    frameworks.load_state(record, accelerator)
    frameworks.load_state(record, accelerator, "other")
    frameworks.save_state(record, accelerator, "other")
    assert calls == ["finish", "checkpoint_4", "finish", "other", "finish", "other"]
    accelerator._models = [SimpleNamespace(checkpoint_engine=object())]  # DeepSpeed's own
    frameworks.load_state(record, accelerator)
    assert calls[6:] == [None]
