# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Environment variables that slow training down or break it, and those that differ between ranks.

What they do is from NVIDIA's documentation of NCCL and CUDA, and from torch's.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_ext.tools.doctor.check import Answers, Check
from deepspeed_ext.tools.doctor.findings import Finding, Level, by_value, ranks_text
from deepspeed_ext.tools.doctor.place import Place

_TOLD = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "GLOO_", "CUDA_", "PYTORCH_", "OMP_", "DEEPSPEED_EXT_", "DS_")
_OWN = ("CUDA_VISIBLE_DEVICES",)  # which launchers set otherwise on each rank
_MANY = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")  # interfaces may have other names on other hosts
_UNSET = ""


@dataclass(frozen=True)
class Harmful:
    """A variable, and values of it that hurt.

    Attributes:
        name: of the variable.
        hurts: whether this value does, for so many hosts.
        level: how much.
        why: what it does.
    """

    name: str
    hurts: Callable[[str, int], bool]
    level: Level
    why: str


def _on(value: str, hosts: int) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _given(value: str, hosts: int) -> bool:
    return bool(value.strip())


def _loopback(value: str, hosts: int) -> bool:
    return hosts > 1 and value.strip().lstrip("=").split(",")[0] == "lo"


ROWS = (
    Harmful(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda value, hosts: value.strip() == "1",
        Level.LOOK,
        "all streams of a device share one work queue, so transfers on side streams wait behind the compute that was "
        "launched before them. Megatron's tensor parallelism asks for it; without that, leave it unset.",
    ),
    Harmful(
        "TORCH_NCCL_BLOCKING_WAIT",
        _on,
        Level.LOOK,
        "the host waits for each collective, so nothing overlaps with compute, and strategies use no side streams.",
    ),
    Harmful("NCCL_BLOCKING_WAIT", _on, Level.LOOK, "the old name of TORCH_NCCL_BLOCKING_WAIT: the host waits."),
    Harmful("CUDA_LAUNCH_BLOCKING", _on, Level.LOOK, "every kernel launch waits for its end: for debugging only."),
    Harmful(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _given,
        Level.LOOK,
        "every tensor is allocated and freed by the driver, which waits for the device: for debugging only.",
    ),
    Harmful(
        "TORCH_DISTRIBUTED_DEBUG",
        lambda value, hosts: value.strip().upper() == "DETAIL",
        Level.LOOK,
        "before each collective, ranks compare its arguments over gloo: for debugging only.",
    ),
    Harmful("NCCL_P2P_DISABLE", _on, Level.LOOK, "devices of a host do not use NVLink or PCIe directly."),
    Harmful(
        "NCCL_P2P_LEVEL",
        lambda value, hosts: value.strip().upper() in ("LOC", "0"),
        Level.LOOK,
        "devices of a host never use NVLink or PCIe directly.",
    ),
    Harmful(
        "NCCL_SHM_DISABLE",
        _on,
        Level.LOOK,
        "devices of a host that reach one another by no direct path use the network instead of shared memory.",
    ),
    Harmful("NCCL_IB_DISABLE", _on, Level.LOOK, "InfiniBand and RoCE are not used: all goes over IP sockets."),
    Harmful(
        "NCCL_NET",
        lambda value, hosts: value.strip().lower() == "socket",
        Level.LOOK,
        "all goes over IP sockets, also where there is InfiniBand.",
    ),
    Harmful(
        "NCCL_NET_GDR_LEVEL",
        lambda value, hosts: value.strip().upper() in ("LOC", "0"),
        Level.LOOK,
        "what goes to the network is copied through host memory (no GPUDirect RDMA).",
    ),
    Harmful("NCCL_ALGO", _given, Level.LOOK, "one algorithm is forced where NCCL chooses by size and topology."),
    Harmful("NCCL_PROTO", _given, Level.LOOK, "one protocol is forced where NCCL chooses by size and topology."),
    Harmful("NCCL_SOCKET_IFNAME", _loopback, Level.WRONG, "NCCL uses the loopback, which reaches no other host."),
    Harmful("GLOO_SOCKET_IFNAME", _loopback, Level.WRONG, "gloo uses the loopback, which reaches no other host."),
    Harmful(
        "DEEPSPEED_EXT_DISABLE",
        _on,
        Level.WRONG,
        "the package stays out of DeepSpeed, which then does not know its keys.",
    ),
)


def examine(place: Place) -> dict[str, Any]:
    """Return the variables that matter, and what decides how many threads a rank should have."""
    import torch
    from deepspeed.accelerator import get_accelerator

    return {
        "variables": {name: value for name, value in place.environment.items() if name.startswith(_TOLD)},
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "on_host": bool(get_accelerator().is_synchronized_device()),
    }


def judge(answers: Answers, place: Place) -> list[Finding]:
    """Return what hurts, what differs, and whether ranks have a sensible number of threads."""
    variables = {rank: answer["variables"] for rank, answer in answers.items()}
    hosts = len(place.ranks_of_hosts())
    found = [finding for row in ROWS for finding in _harm(row, variables, hosts)]
    found += _differences(variables)
    if not found:
        found.append(Finding("variables", Level.OK, "none that hurts, and the same on all ranks"))
    return found + _threads(answers, place)


def _harm(row: Harmful, variables: Mapping[int, Mapping[str, str]], hosts: int) -> list[Finding]:
    values = by_value({rank: mine[row.name] for rank, mine in variables.items() if row.name in mine})
    return [
        Finding(row.name, row.level, f"{value} on {ranks_text(ranks)}: {row.why}", f"Unset {row.name}.")
        for value, ranks in values.items()
        if row.hurts(value, hosts)
    ]


def _differences(variables: Mapping[int, Mapping[str, str]]) -> list[Finding]:
    names = sorted({name for mine in variables.values() for name in mine} - set(_OWN) - set(_MANY))
    found = []
    for name in names:
        values = by_value({rank: mine.get(name, _UNSET) for rank, mine in variables.items()})
        if len(values) > 1:
            said = "; ".join(f"{value or 'unset'} on {ranks_text(ranks)}" for value, ranks in values.items())
            advice = "Set it alike on all nodes. Launchers pass on only some variables to other hosts."
            found.append(Finding(name, Level.LOOK, f"differs: {said}", advice))
    return found


def _threads(answers: Answers, place: Place) -> list[Finding]:
    """Return what hosts have too many or too few threads for, where they compute."""
    if not (place.options.offload_optimizer or any(answer["on_host"] for answer in answers.values())):
        return []
    found = []
    for host, ranks in place.ranks_of_hosts().items():
        told = [answers[rank] for rank in ranks if rank in answers]
        if not told:
            continue
        cores, threads = max(one["cores"] for one in told), sum(one["threads"] for one in told)
        share = max(1, cores // len(ranks))
        said = f"{threads} threads of {len(ranks)} rank(s) on {cores} core(s) of {host}, where ranks compute"
        if len(ranks) > 1 and threads > 2 * cores:
            said += ": each waits for the others"
        elif 2 * threads <= cores:
            said += ": most cores idle (torchrun sets OMP_NUM_THREADS=1)"
        else:
            continue
        found.append(Finding("OMP_NUM_THREADS", Level.LOOK, said, f"Set OMP_NUM_THREADS={share}."))
    if not found:
        return [Finding("OMP_NUM_THREADS", Level.OK, "threads of ranks fit the cores of their hosts")]
    more = f" (and {len(found) - 1} more host(s) like it)" if len(found) > 1 else ""
    return [replace(found[0], found=found[0].found + more)]


CHECK = Check("environment", examine, judge)
