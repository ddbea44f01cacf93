# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checks without communication: versions, the order of ranks, memory and disks, copies to a device, compilers."""

import math
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed_ext.comm.process_groups import (
    LOCAL_SIZE_VARIABLES,
    default_group_size,
    nodes_of_ranks,
    placement_warning,
    ranks_per_node,
    uneven_nodes_warning,
)
from deepspeed_ext.planner.costs import predict
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import GroupSizes, hyphenate, parse_strategy
from deepspeed_ext.tools.doctor.findings import (
    Finding,
    Level,
    by_value,
    bytes_text,
    finding_for,
    ranks_text,
    rate_text,
)
from deepspeed_ext.tools.doctor.launch import Answers, Check, Launch, Options
from deepspeed_ext.version import __version__

_MAX_LISTED = 4  # maximum number of groups, hosts, or problems that are listed
_DRIVER = Path("/proc/driver/nvidia/version")
_MUST_MATCH = (Level.WRONG, "Install the same version on every node.")
_MAY_DIFFER = (Level.LOOK, "Ranks wait for the slowest rank: use the same version everywhere.")
_LEVELS = dict.fromkeys(("python", "driver", "device"), _MAY_DIFFER)


def _examine_versions(launch: Launch) -> dict[str, Any]:
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from deepspeed_ext.tools.clocks import device_name

    versions = {"deepspeed_ext": __version__, "deepspeed": deepspeed.__version__, "torch": torch.__version__}
    versions |= {"python": platform.python_version(), "device": device_name()}
    if get_accelerator().device_name() == "cuda":
        match = re.search(r"Kernel Module\D*?\s(\d+[\d.]*)", _DRIVER.read_text() if _DRIVER.exists() else "")
        versions |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "driver": match[1] if match else "unknown"}
    return {"versions": versions, "patches": launch.patch_problems()}


def _judge_versions(answers: Answers, launch: Launch) -> list[Finding]:
    findings = []
    for name in dict.fromkeys(name for answer in answers.values() for name in answer["versions"]):
        values = by_value({rank: row.get(name, "none") for rank, row in _column(answers, "versions").items()})
        text = "; ".join(f"{value}: {ranks_text(ranks)}" for value, ranks in values.items() if len(values) > 1)
        level, advice = _LEVELS.get(name, _MUST_MATCH)
        findings.append(finding_for(name, text, advice, next(iter(values)), level))
    for problems, ranks in by_value({rank: tuple(answer["patches"]) for rank, answer in answers.items()}).items():
        if problems or len(ranks) == len(answers):
            more = f", and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
            text = f"{ranks_text(ranks)}: {'; '.join(problems[:_MAX_LISTED])}{more}" if problems else ""
            advice = "The keys of deepspeed_ext are refused there. See python -m deepspeed_ext on that host."
            findings.append(finding_for("patches", text, advice, "as expected", Level.WRONG))
    return findings


VERSIONS = Check(_examine_versions, _judge_versions)

_FILL_ADVICE = "Make the launcher fill one host after the other (srun --distribution=block, mpirun --map-by slot)."


def _judge_groups(answers: Answers, launch: Launch) -> list[Finding]:
    """Judge the order of ranks on hosts, and the resulting groups."""
    hosts = launch.ranks_of_hosts()
    # The most frequent number, so hosts that differ from it are the exceptions.
    usual = statistics.mode(len(ranks) for ranks in hosts.values())
    uneven = _hosts_text({host: ranks for host, ranks in hosts.items() if len(ranks) != usual})
    uneven = uneven and f"most hosts hold {usual} rank(s), but some do not: {uneven}"
    counts, advice = [len(ranks) for ranks in hosts.values()], "Start the same number of ranks on every node."
    if launch.options.group_size is None:
        advice = f"{uneven_nodes_warning(counts, math.gcd(*counts))}. {advice}"
    fine = f"{len(hosts)} of {usual} rank(s): {_hosts_text(hosts)}"
    findings = [finding_for("hosts", uneven, advice, fine, Level.LOOK)]
    scattered = {host: ranks for host, ranks in hosts.items() if ranks != list(range(ranks[0], ranks[-1] + 1))}
    if scattered:
        findings.append(
            Finding("order of ranks", Level.WRONG, f"not consecutive: {_hosts_text(scattered)}", _FILL_ADVICE)
        )
    per_node = by_value(_column(answers, "per_node"))
    if launch.world == 1:
        return [*findings, Finding("groups", Level.OK, "one rank: nothing to group")]
    if None in per_node and launch.options.group_size is None:
        text = f"the launcher says in {' or '.join(LOCAL_SIZE_VARIABLES)} how many ranks share a node: "
        text += "; ".join(f"{value or 'nothing'} on {ranks_text(ranks)}" for value, ranks in per_node.items())
        advice = "Set zero_optimization.paro_group_size, and --group-size."
        return [*findings, Finding("groups", Level.WRONG, text, advice)]
    known, everyone = _column(answers, "per_node"), range(launch.world)
    try:
        size = launch.options.group_size
        size = size or default_group_size(everyone, nodes_of_ranks([known.get(rank) or 0 for rank in everyone]))
        sizes = GroupSizes(launch.world, size)
    except ValueError as error:
        return [*findings, Finding("groups", Level.WRONG, str(error))]
    return [*findings, _groups_finding(sizes, list(hosts), launch)]


def _groups_finding(sizes: GroupSizes, hosts: list[str], launch: Launch) -> Finding:
    m, ranks = sizes.group_size, range(sizes.ranks)
    groups = [list(ranks[first : first + m]) for first in range(0, sizes.ranks, m)]
    more = ", ..." if len(groups) > _MAX_LISTED else ""
    text = f"{sizes.groups} of {m}: {', '.join(map(ranks_text, groups[:_MAX_LISTED]))}{more}"
    spanning = [group for group in groups if len({launch.hosts[rank] for rank in group}) > 1]
    if spanning:
        examples = "; ".join(launch.ranks_with_hosts(group) for group in spanning[:_MAX_LISTED])
        text += f". {len(spanning)} span hosts, so traffic inside a group crosses the network: {examples}"
    divide = "Ignore this if groups should be larger than a host; otherwise set paro_group_size to a divisor."
    singletons, see = ": I means N, so N-I-G and I-I-G are ZeRO-1", 'See "groups of one rank" in troubleshooting.md.'
    one_group = ": nothing is sent between groups, so N-I-G is ZeRO-2, I-I-G ZeRO-3"
    cases: tuple[tuple[object, Level, str, str], ...] = (
        (placement_warning(ranks, m, [hosts.index(host) for host in launch.hosts]), Level.WRONG, "", _FILL_ADVICE),
        (spanning, Level.LOOK, "", divide),
        (m == 1, Level.LOOK, singletons, see),
        (True, Level.OK, one_group if sizes.groups == 1 else "", ""),
    )
    _, level, meaning, advice = next(case for case in cases if case[0])
    return Finding("groups", level, text + meaning, advice)


def _hosts_text(hosts: Mapping[str, list[int]]) -> str:
    text = ", ".join(f"{host} has {ranks_text(ranks)}" for host, ranks in list(hosts.items())[:_MAX_LISTED])
    return text + (", ..." if len(hosts) > _MAX_LISTED else "")


GROUPS = Check(lambda launch: {"per_node": ranks_per_node(launch.environment)}, _judge_groups)

_SHM_BYTES = 66 * 2**20  # bytes of /dev/shm per rank for DeepSpeed's all-reduce on a host; NCCL takes less
_LOCKED_BYTES = 64 * 2**20  # bytes of the buffers of a few InfiniBand connections
_BUILD_BYTES, _MIN_BUILD_BYTES = (
    2**30,
    100 * 2**20,
)  # bytes of disk for all of DeepSpeed's operators, and for LoCo's kernels
_RESERVE = 0.1  # share of the free memory that should remain for activations
_CGROUP, _SHM = Path("/sys/fs/cgroup"), Path("/dev/shm")
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of a parameter or gradient


def _examine_memory(launch: Launch) -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import get_default_build_root

    device = get_accelerator()
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    # The folder is created at the first build, so its nearest existing parent is examined.
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return {
        "device": None if device.is_synchronized_device() else int(device.available_memory()),
        "host": _free_host_memory(),
        "shm": shutil.disk_usage(_SHM).free if _SHM.exists() else 0,
        "locked": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "build": str(folder),
        "writable": os.access(existing, os.W_OK),
        "disk": shutil.disk_usage(existing).free,
    }


def _free_host_memory() -> int:
    """Return the free bytes of this host, within the container's limit."""
    import psutil  # type: ignore[import-untyped]

    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        return min(free, max(0, limit - used))
    except (OSError, ValueError):  # no limit ("max"), or cgroups version 1
        return free


def needed_bytes(options: Options, sizes: GroupSizes) -> tuple[float, float]:
    """Return the planner's prediction of a rank's bytes on its device and on its host, without activations.

    Raises:
        ValueError: there is no such strategy.
    """
    assert options.params is not None
    model = Model.of_size(options.params, width=_BYTES[options.dtype])
    if options.offload_optimizer:
        model = replace(model, held=replace(model.states, optimizer=0.0))
    rates = Rates.of_links(sizes, sizes.group_size, 1, 1)  # any rates: they do not affect memory
    prediction = predict(parse_strategy(options.strategy), sizes, model, rates)
    return prediction.total_memory, prediction.host


def _judge_memory(answers: Answers, launch: Launch) -> list[Finding]:
    findings = _states_findings(answers, launch)
    free, ranks_here = _column(answers, "shm"), {rank: launch.hosts.count(launch.hosts[rank]) for rank in answers}
    short = [rank for rank, count in ranks_here.items() if count > 1 and free[rank] < _SHM_BYTES * count]
    hosts = {launch.hosts[rank]: bytes_text(free[rank]) for rank in short}
    text = ", ".join(f"{host} has {nbytes} free" for host, nbytes in list(hosts.items())[:_MAX_LISTED])
    text += ": NCCL, data loader workers, and DeepSpeed on a CPU share data of a host there"
    advice = "Make it larger (docker run --shm-size=16g, or mount -o remount,size=)."
    ok_text = f"{bytes_text(min(free.values()))} free at least"
    findings.append(finding_for("/dev/shm", text if short else "", advice, ok_text))
    limits = {rank: answer["locked"] for rank, answer in answers.items() if answer["device"] is not None}
    low = {rank: limit for rank, limit in limits.items() if 0 <= limit < _LOCKED_BYTES}
    text = f"RLIMIT_MEMLOCK is {bytes_text(min(low.values(), default=0))} on {ranks_text(low)}: "
    text += "InfiniBand cannot register more memory than that"
    advice = "Raise it (ulimit -l unlimited, docker run --ulimit memlock=-1)."
    findings.append(finding_for("locked memory", text if low else "", advice, "RLIMIT_MEMLOCK is high enough"))
    return [*findings, _build_finding(answers)]


def _states_findings(answers: Answers, launch: Launch) -> list[Finding]:
    """Judge whether the model fits the devices; ranks that compute on a host share its memory."""
    device, host = _column(answers, "device"), _column(answers, "host")
    free = {
        rank: host[rank] / launch.hosts.count(launch.hosts[rank]) if nbytes is None else nbytes
        for rank, nbytes in device.items()
    }
    least, most, options, sizes = min(free.values()), max(free.values()), launch.options, launch.group_sizes()
    subject, text = "for model states", f"{least / 1e9:.1f} to {most / 1e9:.1f} GB free for each rank"
    if options.params is None:
        return [Finding(subject, Level.OK, f"{text}, not compared with a model: give --params and --strategy")]
    if sizes is None:
        return [Finding(subject, Level.LOOK, text, "Fix the groups first.")]
    need, offloaded = needed_bytes(options, sizes)
    text = f"{hyphenate(options.strategy)} of {options.params / 1e9:.3g} B parameters "
    text += f"needs {need / 1e9:.1f} GB a rank; free"
    short = [rank for rank, nbytes in free.items() if nbytes < need]
    if short:
        text += f": {least / 1e9:.1f} GB ({ranks_text(short)})"
        advice = (
            "Shard more finely (python -m deepspeed_ext plan --memory-gb), use more ranks, or stop other processes."
        )
        findings = [Finding(subject, Level.WRONG, text, advice)]
    else:
        scarcest = [rank for rank, nbytes in free.items() if nbytes <= 1.05 * least]
        text += f" at least: {least / 1e9:.1f} GB ({ranks_text(scarcest)})"
        advice = f"Less than {_RESERVE:.0%} is left for activations."
        findings = [finding_for(subject, text if need > (1 - _RESERVE) * least else "", advice, text)]
    if options.offload_optimizer:
        each = offloaded + (need if None in device.values() else 0.0)
        texts = [
            f"{name} has {free_here / 1e9:.1f} GB free, and its {len(ranks)} rank(s) need "
            f"{each * len(ranks) / 1e9:.1f} GB"
            for name, ranks in launch.ranks_of_hosts().items()
            if (free_here := min((host[rank] for rank in ranks if rank in host), default=math.inf)) < each * len(ranks)
        ]
        advice = "Use more nodes, or keep optimizer states on the devices."
        ok_text = f"optimizer states take {offloaded / 1e9:.1f} GB a rank"
        findings.append(finding_for("host memory", (texts or [""])[0], advice, ok_text, Level.WRONG))
    return findings


def _build_finding(answers: Answers) -> Finding:
    closed = [rank for rank, answer in answers.items() if not answer["writable"]]
    if closed:
        text = f"{ranks_text(closed)} cannot write to {answers[closed[0]]['build']}, where operators are compiled"
        return Finding("build folder", Level.LOOK, text, "Set TORCH_EXTENSIONS_DIR to a folder of yours.")
    rank, answer = min(answers.items(), key=lambda item: item[1]["disk"])
    ok_text = f"{bytes_text(answer['disk'])} free for {answer['build']}"
    text = f"{ok_text} ({ranks_text([rank])}), where operators are compiled at first use"
    level = Level.WRONG if answer["disk"] < _MIN_BUILD_BYTES else Level.LOOK
    advice = "Free some, or set TORCH_EXTENSIONS_DIR to another disk."
    return finding_for("build folder", text if answer["disk"] < _BUILD_BYTES else "", advice, ok_text, level)


def _column(answers: Answers, name: str) -> dict[int, Any]:
    return {rank: answer[name] for rank, answer in answers.items()}


MEMORY = Check(_examine_memory, _judge_memory)

_COPY_BYTES = 256 * 2**20  # bytes
_REPEATS = 5
_SLOW_RATIO = 0.7  # of the median rate


def _examine_pinned(launch: Launch) -> dict[str, float] | None:
    """Return bytes per second to the device and back while all ranks copy; None without a device."""
    import torch
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    if device.is_synchronized_device():
        return None
    host = device.pin_memory(torch.ones(_COPY_BYTES // 4))
    on_device, rates = torch.empty_like(host, device=device.current_device_name()), {}
    for direction, target, source in (("to the device", on_device, host), ("from the device", host, on_device)):
        seconds = []
        for _ in range(_REPEATS):
            # Otherwise the time would include earlier work on the device.
            device.synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            device.synchronize()
            seconds.append(time.perf_counter() - begin)
        # The fastest repeat: other load only slows a copy down.
        rates[direction] = _COPY_BYTES / min(seconds)
    return rates


def _judge_pinned(answers: Answers, launch: Launch) -> list[Finding]:
    copied = {rank: answer for rank, answer in answers.items() if answer is not None}
    if not copied:
        return [Finding("copies", Level.OK, "ranks compute on the host: nothing is copied")]
    findings = []
    for direction in next(iter(copied.values())):
        usual = statistics.median(answer[direction] for answer in copied.values())
        slow = {rank: answer[direction] for rank, answer in copied.items() if answer[direction] < _SLOW_RATIO * usual}
        text = f"{ranks_text(slow)} copy at {rate_text(min(slow.values(), default=0))}, "
        text += f"the median is {rate_text(usual)}"
        advice = "Look at the PCIe link of these devices (nvidia-smi -q: link width), and whether ranks run near them "
        ok_text = f"{rate_text(usual)} in the median of all ranks"
        findings.append(finding_for(direction, text if slow else "", advice + "(NUMA).", ok_text))
    return findings


PINNED = Check(_examine_pinned, _judge_pinned)

_WITHOUT_COMPILER = (
    "LoCo's operators run in plain PyTorch, more slowly, and DeepSpeed's own (FusedAdam, CPUAdam) cannot be built; "
    "no strategy needs them"
)
_INSTALL_ADVICE = {
    "c++": "Install g++, or name another compiler in CXX.",
    "ninja": "Install it (pip install ninja), and add its folder to PATH.",
    "nvcc": "Install the CUDA toolkit of torch's CUDA version, and set CUDA_HOME.",
}


def _examine_compiler(launch: Launch) -> dict[str, Any]:
    """Return each tool's path, found as by torch's cpp_extension; empty if the tool is missing."""
    import torch

    from deepspeed_ext.op_builder import LocoBuilder

    compiler, version = os.environ.get("CXX", "c++").split(), None
    tools = {"c++": shutil.which(compiler[0]) or "" if compiler else "", "ninja": shutil.which("ninja") or ""}
    if torch.version.cuda is not None and torch.cuda.is_available():
        from torch.utils.cpp_extension import CUDA_HOME

        tools["nvcc"] = shutil.which(f"{CUDA_HOME}/bin/nvcc") or "" if CUDA_HOME else ""
        if tools["nvcc"]:
            command = [tools["nvcc"], "--version"]
            output = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
            version = re.search(r"release (\d+\.\d+)", output)
    cuda = {"nvcc": version[1] if version else "", "torch": torch.version.cuda or ""}
    return {"tools": tools, "built": LocoBuilder().is_built(), **cuda}


def _judge_compiler(answers: Answers, launch: Launch) -> list[Finding]:
    findings = []
    for tool in dict.fromkeys(name for answer in answers.values() for name in answer["tools"]):
        paths = by_value({rank: answer["tools"].get(tool, "") for rank, answer in answers.items()})
        missing = paths.pop("", [])
        hosts = ", ".join(list(dict.fromkeys(launch.hosts[rank] for rank in missing))[:_MAX_LISTED])
        text = f"not found on {ranks_text(missing)} ({hosts}): {_WITHOUT_COMPILER}"
        findings.append(finding_for(tool, text if missing else "", _INSTALL_ADVICE[tool], ", ".join(paths)))
    # Minor versions of CUDA are compatible with each other.
    major = {rank: [answer[name].split(".")[0] for name in ("nvcc", "torch")] for rank, answer in answers.items()}
    mismatched = [rank for rank, (nvcc, torch) in major.items() if nvcc and nvcc != torch]
    if mismatched:
        nvcc, torch = answers[mismatched[0]]["nvcc"], answers[mismatched[0]]["torch"]
        text = f"CUDA {nvcc} on {ranks_text(mismatched)}, torch was built with {torch}: nothing can be compiled"
        findings.append(Finding("version of nvcc", Level.LOOK, text, _INSTALL_ADVICE["nvcc"]))
    if all(answer["built"] for answer in answers.values()):
        findings.append(Finding("LoCo's kernels", Level.OK, "built ahead of time"))
    return findings


COMPILER = Check(_examine_compiler, _judge_compiler)
