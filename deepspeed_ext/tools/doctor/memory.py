# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory of devices and hosts, against what a strategy needs; shared memory; the disk that kernels are built on."""

import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed_ext.planner.costs import predict
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import GroupSizes, parse_strategy
from deepspeed_ext.tools.doctor.check import Answers, Check
from deepspeed_ext.tools.doctor.findings import Finding, Level, bytes_text, ranks_text
from deepspeed_ext.tools.doctor.place import Options, Place

_SHARED = 66 * 2**20  # bytes of /dev/shm that DeepSpeed's all-reduce on a host takes for each rank; NCCL takes less
_LOCKED = 64 * 2**20  # bytes; InfiniBand's buffers of a few connections
_BUILD, _LEAST_BUILD = 2**30, 100 * 2**20  # bytes of disk: all of DeepSpeed's operators; LoCo's kernels alone
_LEFT = 0.1  # of the free memory that should be left for activations
_CGROUP = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")


def examine(place: Place) -> dict[str, Any]:
    """Return free bytes of the device, of the host, of /dev/shm and the disk for builds; the limit of locked ones."""
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import get_default_build_root

    device = get_accelerator()
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    there = next(one for one in (folder, *folder.parents) if one.exists())
    on_host = bool(device.is_synchronized_device())
    return {
        "device": None if on_host else int(device.available_memory()),
        "host": _host_memory(),
        "shm": shutil.disk_usage(_SHM).free if _SHM.exists() else 0,
        "locked": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "build": str(folder),
        "writable": os.access(there, os.W_OK),
        "disk": shutil.disk_usage(there).free,
    }


def judge(answers: Answers, place: Place) -> list[Finding]:
    """Return what is too little."""
    found = [_device(answers, place), _host(answers, place)]
    return [*(one for one in found if one is not None), _shm(answers, place), _locked(answers), _disk(answers)]


def needs(options: Options, sizes: GroupSizes) -> tuple[float, float]:
    """Return the bytes that a rank needs on its device and on its host, as the planner predicts them.

    Without activations.

    Raises:
        ValueError: there is no such strategy.
    """
    assert options.params is not None
    model = Model.of_size(options.params, width=options.dtype_bytes)
    if options.offload_optimizer:
        model = replace(model, held=replace(model.states, optimizer=0.0))
    rates = Rates.of_links(sizes, sizes.group_size, 1, 1)  # of no consequence for memory
    found = predict(parse_strategy(options.strategy), sizes, model, rates)
    return found.total_memory, found.host


def _device(answers: Answers, place: Place) -> Finding | None:
    """Return whether the model fits the devices; where ranks compute on the host, its memory is divided among them."""
    free = {rank: _of_rank(rank, answers, place) for rank in answers}
    least = min(free.values())
    least_ranks = [rank for rank, value in free.items() if value <= 1.05 * least]
    said = f"{least / 1e9:.1f} to {max(free.values()) / 1e9:.1f} GB free for each rank"
    if place.options.params is None:
        note = ", not compared with a model: give --params and --strategy"
        return Finding("for model states", Level.OK, said + note)
    sizes = _sizes(place)
    if sizes is None:
        return Finding("for model states", Level.LOOK, said, "The groups have to be right first.")
    need, _ = needs(place.options, sizes)
    what = (
        f"{place.options.strategy} of {place.options.params / 1e9:.3g} B parameters needs {need / 1e9:.1f} GB a rank"
    )
    short = [rank for rank, value in free.items() if value < need]
    if short:
        said = f"{what}; free: {min(free[rank] for rank in short) / 1e9:.1f} GB ({ranks_text(short)})"
        advice = "Shard more finely (python -m deepspeed_ext plan --memory-gb), use more ranks, or end what else runs."
        return Finding("for model states", Level.WRONG, said, advice)
    said = f"{what}; free at least: {least / 1e9:.1f} GB ({ranks_text(least_ranks)})"
    if need > (1 - _LEFT) * least:
        return Finding("for model states", Level.LOOK, said, f"Less than {_LEFT:.0%} is left for activations.")
    return Finding("for model states", Level.OK, said)


def _host(answers: Answers, place: Place) -> Finding | None:
    """Return whether what is offloaded fits the hosts; None if nothing is."""
    if not (place.options.offload_optimizer and place.options.params is not None):
        return None
    sizes = _sizes(place)
    if sizes is None:
        return None
    _, need = needs(place.options, sizes)
    on_device = 0.0 if all(answers[rank]["device"] is not None for rank in answers) else needs(place.options, sizes)[0]
    for host, ranks in place.ranks_of_hosts().items():
        told = [answers[rank]["host"] for rank in ranks if rank in answers]
        total = (need + on_device) * len(ranks)
        if told and min(told) < total:
            said = f"{host} has {min(told) / 1e9:.1f} GB free, and its {len(ranks)} rank(s) need {total / 1e9:.1f} GB"
            advice = "Use more nodes, or keep optimizer states on the devices."
            return Finding("host memory", Level.WRONG, said, advice)
    return Finding("host memory", Level.OK, f"optimizer states take {need / 1e9:.1f} GB a rank")


def _of_rank(rank: int, answers: Answers, place: Place) -> float:
    answer = answers[rank]
    if answer["device"] is not None:
        return float(answer["device"])
    return float(answer["host"] / len(place.ranks_of_hosts()[place.hosts[rank]]))


def _sizes(place: Place) -> GroupSizes | None:
    try:
        return GroupSizes(place.world, len(place.teams()[0]) if not place.options.group_size else _given(place))
    except ValueError:
        return None


def _given(place: Place) -> int:
    assert place.options.group_size is not None
    return place.options.group_size


def _shm(answers: Answers, place: Place) -> Finding:
    short = {}
    for host, ranks in place.ranks_of_hosts().items():
        free = min((answers[rank]["shm"] for rank in ranks if rank in answers), default=None)
        if free is not None and len(ranks) > 1 and free < _SHARED * len(ranks):
            short[host] = free
    if not short:
        return Finding(
            "/dev/shm", Level.OK, f"{bytes_text(min(one['shm'] for one in answers.values()))} free at least"
        )
    said = ", ".join(f"{host} has {bytes_text(free)} free" for host, free in list(short.items())[:4])
    said += ": NCCL, workers of data loaders, and DeepSpeed on a CPU put what ranks of a host share there"
    return Finding(
        "/dev/shm", Level.LOOK, said, "Make it larger (docker run --shm-size=16g, or mount -o remount,size=)."
    )


def _locked(answers: Answers) -> Finding:
    short = [rank for rank, one in answers.items() if 0 <= one["locked"] < _LOCKED and one["device"] is not None]
    if not short:
        return Finding("locked memory", Level.OK, "RLIMIT_MEMLOCK does not get in the way")
    said = f"RLIMIT_MEMLOCK is {bytes_text(min(answers[rank]['locked'] for rank in short))} on {ranks_text(short)}: "
    said += "InfiniBand registers memory under it, and fails beyond"
    return Finding(
        "locked memory", Level.LOOK, said, "Raise it (ulimit -l unlimited, docker run --ulimit memlock=-1)."
    )


def _disk(answers: Answers) -> Finding:
    least = min(answers, key=lambda rank: answers[rank]["disk"])
    one = answers[least]
    said = f"{bytes_text(one['disk'])} free for {one['build']}"
    closed = [rank for rank, other in answers.items() if not other["writable"]]
    if closed:
        said = f"{ranks_text(closed)} may not write to {answers[closed[0]]['build']}, where operators are compiled"
        return Finding("build folder", Level.LOOK, said, "Set TORCH_EXTENSIONS_DIR to a folder of yours.")
    if one["disk"] < _BUILD:
        level = Level.WRONG if one["disk"] < _LEAST_BUILD else Level.LOOK
        said += f" ({ranks_text([least])}), where operators are compiled at first use"
        return Finding("build folder", level, said, "Free some, or set TORCH_EXTENSIONS_DIR to another disk.")
    return Finding("build folder", Level.OK, said)


def _host_memory() -> int:
    """Return the bytes that this host, or the container's limit, has left."""
    import psutil  # type: ignore[import-untyped]

    free = int(psutil.virtual_memory().available)
    try:
        most, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if most == "max" else min(free, max(0, int(most) - int(used)))
    except (OSError, ValueError):  # no such limit, or an older kind of control groups
        return free


CHECK = Check("memory and disks", examine, judge)
