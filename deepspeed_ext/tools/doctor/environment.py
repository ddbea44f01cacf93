# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checks environment variables that slow training down, break it, or differ between ranks, and NCCL's settings.

Their effects are documented by NVIDIA (NCCL's user guide, "Environment Variables"; the CUDA programming guide) and by
PyTorch. The condition for PAT is NCCL's own (``ncclPatEnable`` in its source).
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from deepspeed_ext.strategy import GroupSizes
from deepspeed_ext.tools.doctor.findings import Finding, Level, by_value, ranks_text
from deepspeed_ext.tools.doctor.launch import Answers, Check, Launch

_PREFIXES = (
    "NCCL_",
    "TORCH_NCCL_",
    "TORCH_DISTRIBUTED_",
    "GLOO_",
    "CUDA_",
    "PYTORCH_",
    "OMP_",
    "DEEPSPEED_EXT_",
    "DS_",
)
# Launchers set CUDA_VISIBLE_DEVICES per rank, and interfaces may have different names on different hosts.
_MAY_DIFFER = {"CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA"}
_ON, _ANY, _LOOPBACK = r"(?!(0|false|no|off)$).+", r".+", r"=?lo(,.*)?"


class Harmful(NamedTuple):
    """Harmful values of a variable: those that match ``pattern``. ``effect`` is their effect."""

    name: str
    pattern: str
    effect: str
    level: Level = Level.LOOK


_QUEUE = (
    "all streams of a device share one work queue, so transfers on side streams wait behind the compute that was "
    "launched before them, and no strategy's hops overlap with it. Megatron's tensor parallelism asks for it; without "
    "that, leave it unset."
)
_WAITS = "the host waits for each collective, so nothing overlaps with compute, and strategies use no side streams."
_NO_CACHE = "every tensor is allocated and freed by the driver, which waits for the device: for debugging only."
_COMPARED = "before each collective, ranks compare its arguments over gloo: for debugging only."
_NO_SHM = "devices of a host without a direct path use the network instead of shared memory."
_NO_GDR = "data for the network is copied through host memory (no GPUDirect RDMA)."
_LO = "uses the loopback, which reaches no other host."
_OUT = "the package does not patch DeepSpeed, which then rejects its keys."
HARMFUL = (
    Harmful("CUDA_DEVICE_MAX_CONNECTIONS", "1", _QUEUE),
    Harmful("TORCH_NCCL_BLOCKING_WAIT", _ON, _WAITS),
    Harmful("NCCL_BLOCKING_WAIT", _ON, "the old name of TORCH_NCCL_BLOCKING_WAIT: the host waits."),
    Harmful("CUDA_LAUNCH_BLOCKING", _ON, "every kernel launch waits for its end: for debugging only."),
    Harmful("PYTORCH_NO_CUDA_MEMORY_CACHING", _ANY, _NO_CACHE),
    Harmful("TORCH_DISTRIBUTED_DEBUG", "DETAIL", _COMPARED),
    Harmful("NCCL_P2P_DISABLE", _ON, "devices of a host do not use NVLink or PCIe directly."),
    Harmful("NCCL_P2P_LEVEL", "LOC|0", "devices of a host never use NVLink or PCIe directly."),
    Harmful("NCCL_SHM_DISABLE", _ON, _NO_SHM),
    Harmful("NCCL_IB_DISABLE", _ON, "InfiniBand and RoCE are not used: all data is sent over IP sockets."),
    Harmful("NCCL_NET", "socket", "all data is sent over IP sockets, even with InfiniBand."),
    Harmful("NCCL_NET_GDR_LEVEL", "LOC|0", _NO_GDR),
    Harmful("NCCL_ALGO", _ANY, "one algorithm is forced; NCCL would choose by size and topology."),
    Harmful("NCCL_PROTO", _ANY, "one protocol is forced; NCCL would choose by size and topology."),
    Harmful("NCCL_SOCKET_IFNAME", _LOOPBACK, f"NCCL {_LO}", Level.WRONG),
    Harmful("GLOO_SOCKET_IFNAME", _LOOPBACK, f"gloo {_LO}", Level.WRONG),
    Harmful("DEEPSPEED_EXT_DISABLE", _ON, _OUT, Level.WRONG),
)


def _examine(launch: Launch) -> dict[str, Any]:
    import torch
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    return {
        "variables": {name: value for name, value in launch.environment.items() if name.startswith(_PREFIXES)},
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "on_host": bool(device.is_synchronized_device()),
        # None for RCCL, whose versions and defaults are different.
        "nccl": list(torch.cuda.nccl.version()) if device.device_name() == "cuda" and torch.version.cuda else None,
    }


def judge(answers: Answers, launch: Launch) -> list[Finding]:
    """Judge variables, threads, and the first rank's NCCL settings, since differences are findings of their own."""
    variables = {rank: answer["variables"] for rank, answer in answers.items()}
    findings = [*_harmful(variables, len(launch.ranks_of_hosts())), *_differences(variables)]
    if not findings:
        findings = [Finding("variables", Level.OK, "no harmful values, and equal on all ranks")]
    if launch.options.offload_optimizer or any(answer["on_host"] for answer in answers.values()):
        findings.append(_threads(answers, launch))
    first = answers[min(answers)]
    return [*findings, *nccl_findings(first["nccl"], first["variables"], launch)] if first["nccl"] else findings


def _harmful(variables: Mapping[int, Mapping[str, str]], hosts: int) -> Iterator[Finding]:
    for name, pattern, effect, level in HARMFUL:
        values = by_value({rank: row[name] for rank, row in variables.items() if name in row})
        for value, ranks in values.items():
            # On one host, the loopback reaches all ranks.
            harmless = pattern == _LOOPBACK and hosts == 1
            if re.fullmatch(pattern, value.strip(), re.IGNORECASE) and not harmless:
                yield Finding(name, level, f"{value} on {ranks_text(ranks)}: {effect}", f"Unset {name}.")


def _differences(variables: Mapping[int, Mapping[str, str]]) -> Iterator[Finding]:
    for name in sorted({name for row in variables.values() for name in row} - _MAY_DIFFER):
        values = by_value({rank: row.get(name, "") for rank, row in variables.items()})
        if len(values) > 1:
            text = "; ".join(f"{value or 'unset'} on {ranks_text(ranks)}" for value, ranks in values.items())
            advice = "Set it to the same value on all nodes. Launchers pass on only some variables to other hosts."
            yield Finding(name, Level.LOOK, f"differs: {text}", advice)


def _threads(answers: Answers, launch: Launch) -> Finding:
    """Return a finding on the first host with too many or too few threads, if ranks compute on their hosts."""
    problems = []
    for host, ranks in launch.ranks_of_hosts().items():
        host_answers = [answers[rank] for rank in ranks if rank in answers]
        cores = max((answer["cores"] for answer in host_answers), default=0)
        threads = sum(answer["threads"] for answer in host_answers)
        text = f"{threads} threads of {len(ranks)} rank(s) on {cores} core(s) of {host}, where ranks compute"
        advice = f"Set OMP_NUM_THREADS={max(1, cores // len(ranks))}."
        if len(ranks) > 1 and threads > 2 * cores:
            problems.append((f"{text}: each waits for the others", advice))
        elif host_answers and 2 * threads <= cores:
            problems.append((f"{text}: most cores idle (torchrun sets OMP_NUM_THREADS=1)", advice))
    if not problems:
        return Finding("OMP_NUM_THREADS", Level.OK, "threads of ranks fit the cores of their hosts")
    (text, advice), *other_problems = problems
    more = f" (and {len(other_problems)} more host(s) like it)" if other_problems else ""
    return Finding("OMP_NUM_THREADS", Level.LOOK, text + more, advice)


_FEW = "efficiency: hops that overlap with compute take as few SMs as their rate allows"
_ZERO = (
    "zero: only collectives on registered symmetric buffers run without SMs. Hops use ordinary buffers, so they "
    "still take SMs from the compute that they overlap with"
)
_DEFAULT = (
    "default: hops are as fast as possible, and take more SMs from the compute that they overlap with; if overlap "
    "slows that down, try NCCL_CTA_POLICY=1"
)
_POLICIES = {
    **dict.fromkeys(("", "0", "DEFAULT"), (Level.OK, _DEFAULT)),
    **dict.fromkeys(("1", "EFFICIENCY"), (Level.OK, _FEW)),
    **dict.fromkeys(("2", "ZERO"), (Level.LOOK, _ZERO)),
}
_PORT_FAILOVER = "NCCL_IB_RESILIENCY_PORT_FAILOVER"
_FAILOVER = {
    True: "on: after a port fails, the hop between groups continues over another one, and is as slow as that; see "
    "whether a node is slow below",
    False: "off: if a port fails, the hop between groups fails, and training ends. Where devices have several "
    "InfiniBand or RoCE ports, NCCL_IB_RESILIENCY_PORT_FAILOVER=1 continues over another one",
}
_RAILS = {
    "0": "0: the hop between groups stays on one rail of the network for each number in a group",
    "1": "1: the hop between groups may cross the rails of the network, which is right if all cards of a node share a "
    "switch, and slow if each has its own",
}


def nccl_findings(version: list[int], variables: Mapping[str, str], launch: Launch) -> list[Finding]:
    """Return the effects of NCCL's version and variables on the hops of a strategy; empty without effects.

    Args:
        version: major, minor, and patch.
        variables: variables of one rank.
        launch: the launch, for its hosts and groups.
    """
    sizes, several_hosts = launch.group_sizes(), len(launch.ranks_of_hosts()) > 1
    findings = []

    def add(subject: str, since: list[int], setting: object, applies: bool, finding: tuple[Level, str] | None) -> None:
        if setting and version < since:
            text = f"NCCL {_version_text(version)} ignores it; {_version_text(since)} and later have it"
            findings.append(Finding(subject, Level.LOOK, text))
        elif applies and version >= since and finding:
            findings.append(Finding(subject, *finding))

    policy, failover = (variables.get(name, "").upper() for name in ("NCCL_CTA_POLICY", _PORT_FAILOVER))
    add("NCCL_CTA_POLICY", [2, 27], policy, launch.world > 1, _POLICIES.get(policy))
    if several_hosts and sizes and not variables.get("NCCL_ALGO"):
        findings += _pat(version, variables.get("NCCL_PAT_ENABLE", "2"), sizes, launch.hosts)
    add("port failover", [2, 29], failover == "1", several_hosts, (Level.OK, _FAILOVER[failover == "1"]))
    rail_text = _RAILS.get(variables.get("NCCL_CROSS_NIC", ""))
    add("NCCL_CROSS_NIC", [], "", several_hosts, None if rail_text is None else (Level.OK, rail_text))
    return findings


def _version_text(version: list[int]) -> str:
    return ".".join(map(str, version))


def _pat(version: list[int], enabled: str, sizes: GroupSizes, hosts: Sequence[str]) -> Iterator[Finding]:
    """Yield whether hops between groups take a logarithmic number of steps; with two groups, a ring also takes 1."""
    k, m = sizes.groups, sizes.group_size
    shared = any(len(set(hosts[number::m])) < k for number in range(m))
    ring = f"all-gathers and reduce-scatters between the {k} groups take the {k - 1} steps of a ring"
    if k < 3 or (shared and enabled == "1"):
        return
    if version < [2, 23]:
        yield Finding("PAT", Level.OK, f"NCCL has it since 2.23, so {ring}")
    elif enabled == "0":
        yield Finding("PAT", Level.LOOK, f"disabled, so {ring}", "Unset NCCL_PAT_ENABLE.")
    elif shared:
        text = f"NCCL uses it for one rank per node; here several ranks of a node are in one communicator, so {ring}"
        yield Finding("PAT", Level.LOOK, text, "Use whole nodes as groups, unless smaller groups are intended.")
    else:
        steps = f"{math.ceil(math.log2(k))} steps for small messages, not the {k - 1} of a ring"
        flat = "; collectives over all ranks, as ZeRO's, take a ring" if len(set(hosts)) < len(hosts) else ""
        yield Finding("PAT", Level.OK, f"possible between groups, with one rank per node: {steps}{flat}")


ENVIRONMENT = Check(_examine, judge)
