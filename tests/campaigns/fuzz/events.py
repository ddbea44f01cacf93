# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Operations of users between two steps; inside rank processes only. An event is one of two kinds. Some change the
training, and stock DeepSpeed's run has them, too (``SHARED``). All others must change nothing, and only our run has
them: that also keeps stock's own faults in them away."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed import utils
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from deepspeed_ext.checkpoint.folder import CheckpointError
from tests.campaigns.fuzz.run import Run
from tests.harness import snapshots, training

OF_USER, OF_MORE_RANKS = "notes.txt", "zero_pp_rank_99_mp_rank_00_optim_states.pt"
GATHER = "stage3_gather_16bit_weights_on_model_save"
SHARED = ("evaluate", "frozen", "weights", "rate", "restart")


def evaluate(run: Run, value: Any) -> None:
    x, y = next(run.data)
    run.set_calls(run.model, run.calls)
    run.engine.eval()
    with torch.no_grad():
        run.losses.append(((run.engine(x) - y) ** 2).float().mean())
    run.engine.train()


def save_and_load(run: Run, value: Any) -> None:
    """Load the checkpoint that has just been saved, over another of the same tag, into the same engine."""
    with snapshots.shared_folder() as folder:
        run.engine.save_checkpoint(folder, client_state={"number": 1})
        for name in (OF_USER, OF_MORE_RANKS):
            snapshots.on_first_rank(lambda name=name: Path(folder, Path(folder, "latest").read_text(), name).touch())
        run.engine.save_checkpoint(folder, client_state={"number": 2})
        dist.barrier()  # the first rank removes what was replaced
        tags = [entry for entry in Path(folder).iterdir() if entry.is_dir()]
        assert len(tags) == 1, f"a save leaves {tags}"
        retained = [(tags[0] / name).exists() for name in (OF_USER, OF_MORE_RANKS)]
        assert retained == [True, False], f"a save keeps a user's file, and one of an older save: {retained}"
        path, client_state = run.engine.load_checkpoint(folder)
        assert path is not None and client_state["number"] == 2, f"an older save was loaded: {client_state}"


def load_broken(run: Run, value: tuple[int, str]) -> None:
    """Try to load a checkpoint that lacks a file, or the end of one; it is refused, and training continues."""
    number, how = value
    with snapshots.shared_folder() as folder:
        run.engine.save_checkpoint(folder)
        dist.barrier()
        files = sorted(Path(folder).rglob("*_states.pt"))
        file = files[number % len(files)]
        snapshots.on_first_rank(file.unlink if how == "gone" else lambda: os.truncate(file, file.stat().st_size // 2))
        try:
            run.engine.load_checkpoint(folder)
        except CheckpointError:
            return
        raise AssertionError(f"loaded without {file.name}, which was {how}")


def resume(run: Run, value: Any) -> None:
    """Continue in a new engine."""
    stepped = run.stepped
    with snapshots.shared_folder() as folder:
        run.engine.save_checkpoint(folder)
        run.make_anew()
        path, _ = run.engine.load_checkpoint(folder)
        assert path is not None
    run.stepped = stepped


def go_on_elsewhere(run: Run, value: Any, universal: bool) -> None:
    """Continue under other keys of zero_optimization, by a checkpoint that is universal, or becomes so in the load."""
    if not run.stepped:  # DeepSpeed's converter needs optimizer states
        return
    with snapshots.shared_folder() as folder:
        run.engine.save_checkpoint(folder)
        if universal:
            snapshots.convert(folder)
        run.make_anew(value, {"checkpoint": {"load_universal": True}})
        tag = f"{Path(folder, 'latest').read_text()}_universal" if universal else None
        path, _ = run.engine.load_checkpoint(folder, tag=tag)
        assert path is not None
        run.engine._config.load_universal_checkpoint = False  # what is loaded later is its own
    run.stepped = True


def look(run: Run, value: int) -> None:
    parameters = list(run.model.parameters())
    subset = list({id(p): p for p in (parameters[value % len(parameters)], parameters[-1])}.values())
    with deepspeed.zero.GatheredParameters(subset):
        run.seen.append(sum(p.detach().float().abs().sum() for p in subset))


def write_nothing(run: Run, value: int) -> None:
    """Gather a parameter as for a change, without changing it."""
    parameters = list(run.model.parameters())
    param = parameters[value % len(parameters)]
    if getattr(param, "ds_status", None) in (None, ZeroParamStatus.NOT_AVAILABLE):
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            if modifies(run, param):
                param.data.mul_(1.0)


def modifies(run: Run, param: Any) -> bool:
    """Whether this rank may change the parameters that it has gathered: each, where parameters are replicated."""
    return not hasattr(param, "ds_tensor") or dist.get_rank() // run.case.tensor_parallel == 0


def change_frozen(run: Run, value: float) -> None:
    """Change all that is frozen, which no optimizer holds."""
    frozen = [p for p in run.model.parameters() if not p.requires_grad]
    with deepspeed.zero.GatheredParameters(frozen, modifier_rank=0):
        for param in frozen:
            if modifies(run, param):
                param.data.mul_(value)


def change_weights(run: Run, value: float) -> None:
    param = max((p for p in run.model.parameters() if p.requires_grad), key=training_size)
    changed = utils.safe_get_full_fp32_param(param) * value
    if run.ours or not hasattr(param, "ds_tensor"):
        utils.safe_set_full_fp32_param(param, changed)
        return
    # Stock's stage 3 reads beyond the end of a parameter that ranks do not divide: its last rank raises, others wait.
    retained, group = param.ds_tensor.numel(), param.ds_process_group
    padded = torch.nn.functional.pad(changed.flatten(), (0, retained * dist.get_world_size(group) - changed.numel()))
    utils.safe_set_local_fp32_param(param, padded[retained * dist.get_rank(group) :][:retained])


def training_size(param: Any) -> int:
    """Elements of a whole parameter."""
    return int(getattr(param, "ds_numel", param.numel()))


def change_rate(run: Run, value: float) -> None:
    for group in run.engine.optimizer.param_groups:
        group["lr"] *= value


def read_states(run: Run, value: int) -> None:
    trained = [p for p in run.model.parameters() if p.requires_grad and training_size(p)]
    if trained and run.stepped:
        param = trained[value % len(trained)]
        by_momentum = run.job.optimizer == "SGD" or getattr(param, "use_muon", False)
        name = "momentum_buffer" if by_momentum else "exp_avg"
        weights, moment = utils.safe_get_full_fp32_param(param), utils.safe_get_full_optimizer_state(param, name)
        run.seen += [weights.float().abs().sum(), moment.float().abs().sum()]
        if not run.case.lossy:  # else the optimizer's weights have what has not yet been sent
            with deepspeed.zero.GatheredParameters([param]):
                assert torch.equal(weights.to(param.dtype), param.detach()), "the optimizer's weights are others"


def offload(run: Run, value: Sequence[str] | None) -> None:
    """Move states, or some kinds of them, to the host and back; of shards stage 3 moves FusedAdam's only."""
    if any(hasattr(param, "ds_tensor") for param in run.model.parameters()):
        value = [name for name in value or ("lp_params",) if name.startswith("lp_")]
    run.engine.offload_states(None if value is None else [OffloadStateTypeEnum(name) for name in value])
    run.engine.reload_states()


def export(run: Run, value: Any) -> None:
    """Save the weights as a model that other programs read, and read them."""
    named = dict(run.model.named_parameters())
    with snapshots.shared_folder() as folder:
        saved = run.engine.save_16bit_model(folder)
        sharded = any(hasattr(param, "ds_tensor") for param in named.values())
        assert saved == (not sharded or bool(run.zero.get(GATHER))), "a model was saved, or not"
        dist.barrier()
        # Experts have files of their own, and tensor-parallel ranks, which train apart here, one file together.
        alone = saved and not run.case.network and run.case.tensor_parallel == 1
        weights = torch.load(f"{folder}/pytorch_model.bin") if alone else {}
    with deepspeed.zero.GatheredParameters(list(named.values())):
        for name in weights.keys() & named.keys():
            assert torch.equal(weights[name], named[name].detach()), f"the exported {name} is another"


def second_engine(run: Run, value: Any) -> None:
    engine, _ = run.make_engine({})
    data = training.batches(run.job)
    for _ in range(run.job.accumulation):
        x, y = next(data)
        run.set_calls(engine.module, 0)
        engine.backward(((engine(x) - y) ** 2).float().mean())
        engine.step()
    engine.destroy()


def restart(run: Run, value: Any) -> None:
    run.make_anew()


EVENTS: dict[str, Callable[[Run, Any], None]] = {
    "evaluate": evaluate,
    "frozen": change_frozen,
    "weights": change_weights,
    "rate": change_rate,
    "restart": restart,
    "save and load": save_and_load,
    "resume": resume,
    "broken load": load_broken,
    "universal": partial(go_on_elsewhere, universal=True),
    "elsewhere": partial(go_on_elsewhere, universal=False),
    "look": look,
    "write nothing": write_nothing,
    "states": read_states,
    "offload": offload,
    "export": export,
    "second engine": second_engine,
}
