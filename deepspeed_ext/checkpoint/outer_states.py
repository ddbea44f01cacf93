# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Outer optimizers in checkpoints: a file for each rank, in addition to DeepSpeed's.

DeepSpeed's files contain the anchors (the result of the last outer step) and the first group's inner optimizer states.
Any strategy, DeepSpeed and its tools can continue from them. The additional files contain each group's own weights and
states, with the outer weights and momentum. A run with the same sharding and settings continues from them bit for bit.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import TypedDict

from deepspeed_ext.checkpoint.files import STRICT, CheckpointFiles
from deepspeed_ext.checkpoint.folder import CheckpointError, RankFile
from deepspeed_ext.comm.agreement import any_rank, run_on_all_or_raise
from deepspeed_ext.console import warn_on_rank_0
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.zero.optimizer import ParoOptimizer
from deepspeed_ext.zero.outer import OuterOptimizer


class _Outer(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    step: int
    fragments: list[tuple[int, Tensor, Tensor]]
    errors: dict[str, Any]


class _Content(TypedDict):
    """Fields of a rank's file."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    described: dict[str, Any]
    outer: _Outer
    weights: dict[int, Tensor]
    states: dict[int, dict[str, Any]]


def file_content(engine: Engine) -> dict[str, Any] | None:
    """Return the content of this rank's file. Collective.

    Called before the anchors replace the group's weights.

    Returns:
        None without an outer optimizer.
    """
    optimizer: ParoOptimizer = engine.optimizer
    if not isinstance(optimizer.outer, OuterOptimizer):
        return None
    shards = {shard.number: optimizer.shard_weights(shard.number) for shard in optimizer.flat_shards()}
    return {
        "described": _description(engine, optimizer.outer),
        "outer": optimizer.outer.state(),
        "weights": {number: weights.detach().cpu().clone() for number, weights in shards.items()},
        "states": {
            number: _copy_states(optimizer.optimizer.state.get(weights, {})) for number, weights in shards.items()
        },
    }


def _copy_states(states: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else value for name, value in states.items()
    }


def _description(engine: Engine, outer: OuterOptimizer) -> dict[str, Any]:
    return {"strategy": engine.optimizer.strategy.name, **outer.compatibility()}


def save(engine: Engine, files: CheckpointFiles, content: dict[str, Any] | None, save_dir: str, tag: str) -> None:
    """Write this rank's file, if it has content."""
    if content is not None:
        files.save(content, str(Path(save_dir, tag, _name(engine))))


def _name(engine: Engine) -> str:
    return RankFile.OUTER.file_name(engine.optimizer.outer.topology.rank, engine.checkpoint_mp_rank)


class OuterStates:
    """The outer optimizer's states in a checkpoint, read before a load changes anything.

    Args:
        engine: the engine that will load.
        with_states: whether optimizer states are loaded at all.

    Raises:
        CheckpointError: this rank's file cannot be read.
    """

    def __init__(self, engine: Engine, folder: Path, with_states: bool) -> None:
        self._optimizer: ParoOptimizer = engine.optimizer
        self._folder = folder
        self._content: Mapping[str, Any] = {}
        outer = self._optimizer.outer
        if not isinstance(outer, OuterOptimizer):
            return
        self._outer = outer
        path = folder / _name(engine)
        files: CheckpointFiles = engine.checkpoint_engine
        if with_states and path.exists():
            content = files.inspect(path, schema=_Content)
            # Older versions did not replace these files in a save without an outer optimizer, so they may be stale.
            same_save = files.belongs_to_save(path, files.read_header(folder))
            if same_save and content["described"] == _description(engine, outer):
                self._check_shapes(path, content)
                self._content = content

    def _check_shapes(self, path: Path, content: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a tensor cannot be copied into this run's."""
        names, saved = ("weights", "momentum"), {f"weights.{number}": it for number, it in content["weights"].items()}
        numbers = [shard.number for shard in self._optimizer.flat_shards()]
        current = {f"weights.{number}": self._optimizer.shard_weights(number) for number in numbers}
        for number, fragment in enumerate(self._outer.fragments):
            current |= {f"outer.fragments.{number}.{name}": getattr(fragment, name) for name in names}
        for number, (_, *tensors) in enumerate(content["outer"]["fragments"]):
            saved |= {f"outer.fragments.{number}.{name}": it for name, it in zip(names, tensors, strict=True)}
        for name in sorted(current.keys() | saved.keys()):
            shape, expected = (list(row[name].shape) if name in row else None for row in (saved, current))
            if shape != expected:
                raise CheckpointError(f"{path}: {name} has the shape {shape}, expected {expected}.")

    def load(self) -> None:
        """Load the saved states, or restart from the weights that DeepSpeed has loaded. Collective."""
        if not isinstance(self._optimizer.outer, OuterOptimizer):
            return
        if any_rank(not self._content):  # on all ranks, or their outer steps would no longer coincide
            self._outer.restart()
            warn_on_rank_0(
                f"{self._folder} has no states of this outer optimizer (other groups, other settings, "
                f"another save, or none). All groups start from its weights and the first group's optimizer states."
            )
            return
        run_on_all_or_raise(self._load_content, f"the load of {self._folder} failed halfway", CheckpointError)
        self._optimizer.send_parameters()  # DeepSpeed has loaded the anchors into the model

    def _load_content(self) -> None:
        self._outer.load(self._content["outer"])
        for number, saved in self._content["weights"].items():
            weights = self._optimizer.shard_weights(number)
            states = self._optimizer.optimizer.state[weights]
            _require_same_names(self._folder, states, self._content["states"][number])
            weights.data.copy_(saved)
            for name, value in self._content["states"][number].items():
                states[name] = _copy_into(states.get(name), value)


def _require_same_names(folder: Path, states: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    if states and set(states) != set(saved):
        raise CheckpointError(
            f"{folder} has optimizer states {sorted(saved)} in its outer_rank_*.pt, expected {sorted(states)}."
        )


def _copy_into(current: Any, saved: Any) -> Any:
    """Return a saved state; a tensor is copied into DeepSpeed's."""
    if isinstance(current, Tensor) and isinstance(saved, Tensor):
        current.copy_(torch.as_tensor(saved))
        return current
    return saved
