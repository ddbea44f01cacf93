# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Findings from the answers of ranks: one planted fault each, and none without a fault."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ext.strategy import GroupSizes
from deepspeed_ext.tools.doctor import checks, environment, links
from deepspeed_ext.tools.doctor import kernels as self_test
from deepspeed_ext.tools.doctor.findings import Finding, Level, ranks_text
from deepspeed_ext.tools.doctor.launch import Check, Launch, Options

pytestmark = pytest.mark.quick


def launch(hosts: str = "aabb", **options: Any) -> Launch:
    """Return a launch; each letter is the host of a rank."""
    return Launch(0, 0, [*hosts], Options(**options))


def bad(check: Check, usual: Any, *last: Any, hosts: str = "aabb", **options: Any) -> dict[str, Finding]:
    """Findings that are not ok, by subject, where all ranks answer as usual, and the last ones otherwise."""
    answers = [*[usual] * (len(hosts) - len(last)), *(finding and {**usual, **finding} for finding in last)]
    judged = check.judge(dict(enumerate(answers)), launch(hosts, **options))
    assert judged
    return {finding.subject: finding for finding in judged if finding.level > Level.OK}


def test_groups_and_the_order_of_ranks() -> None:
    groups = partial(bad, checks.GROUPS, {"per_node": 2})
    assert not groups()
    judged = groups(hosts="abab")
    assert judged["order of ranks"].level == judged["groups"].level == Level.WRONG
    assert "a has ranks 0, 2, b has ranks 1, 3" in judged["order of ranks"].found
    assert "ranks 0-1 on a, b" in judged["groups"].found and "--distribution=block" in judged["groups"].advice
    larger = groups(group_size=4)["groups"]
    assert larger.level == Level.LOOK and "1 span hosts" in larger.found
    assert "ZeRO-1" in groups(group_size=1)["groups"].found
    assert "one of [1, 2, 4]" in groups(group_size=3)["groups"].found
    judged = bad(checks.GROUPS, {"per_node": 3}, {"per_node": 1}, hosts="aaab")
    assert "b has rank 3" in judged["hosts"].found and "so I means N" in judged["hosts"].advice
    assert "4 of 1" in judged["groups"].found
    assert "nothing on ranks 0-3" in bad(checks.GROUPS, {"per_node": None})["groups"].found


USUAL = {"variables": {"NCCL_DEBUG": "WARN"}, "cores": 4, "threads": 2, "on_host": False, "nccl": None}


def variables(**of_last: str) -> dict[int, dict[str, Any]]:
    return dict(enumerate([USUAL, USUAL, USUAL, {**USUAL, "variables": {"NCCL_DEBUG": "WARN", **of_last}}]))


# A harmful value of a variable and a harmless one, if these are not 1 and 0.
VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "8"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "INFO"),
    "NCCL_NET": ("Socket", "IB"),
    **dict.fromkeys(("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL"), ("LOC", "SYS")),
    **dict.fromkeys(("NCCL_ALGO", "NCCL_PROTO", "PYTORCH_NO_CUDA_MEMORY_CACHING"), ("Ring", "")),
    **dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), ("lo", "eth0")),
}


@pytest.mark.parametrize("name", [row.name for row in environment.HARMFUL])
def test_a_bad_variable(name: str) -> None:
    value, harmless = VARIABLES.get(name, ("1", "0"))
    judged, differences = (
        [finding for finding in environment.judge(variables(**{name: setting}), launch()) if finding.subject == name]
        for setting in (value, harmless)
    )
    assert any(f"{value} on rank 3: " in finding.found and finding.advice for finding in judged)
    assert all(finding.found.startswith("differs: ") for finding in differences)


def test_variables_that_differ_and_threads() -> None:
    judged = bad(environment.ENVIRONMENT, USUAL, variables(NCCL_BUFFSIZE="1", CUDA_VISIBLE_DEVICES="3")[3])
    assert "unset on ranks 0-2; 1 on rank 3" in judged["NCCL_BUFFSIZE"].found and len(judged) == 1
    text = bad(environment.ENVIRONMENT, {**USUAL, "threads": 8, "on_host": True})["OMP_NUM_THREADS"].found
    assert "16 threads of 2 rank(s) on 4 core(s) of a" in text
    few = {**USUAL, "cores": 64, "threads": 1}
    assert not bad(environment.ENVIRONMENT, few)
    judged = bad(environment.ENVIRONMENT, few, offload_optimizer=True)
    assert judged["OMP_NUM_THREADS"].advice == "Set OMP_NUM_THREADS=32."


def nccl(
    version: str = "2.29.7", hosts: str = "aabbccdd", size: int | None = None, **setting: str
) -> dict[str, Finding]:
    findings = environment.nccl_findings([*map(int, version.split("."))], setting, launch(hosts, group_size=size))
    return {finding.subject: finding for finding in findings}


def test_settings_of_nccl() -> None:
    assert not nccl(hosts="a") and set(nccl(hosts="aa")) == {"NCCL_CTA_POLICY"}
    usual = nccl(NCCL_CROSS_NIC="0")
    assert set(usual) == {"NCCL_CTA_POLICY", "PAT", "port failover", "NCCL_CROSS_NIC"}
    assert all(finding.level == Level.OK for finding in usual.values()), "nothing is wrong with the defaults"
    assert "2 steps for small messages, not the 3 of a ring; collectives over all" in usual["PAT"].found
    assert usual["port failover"].found.startswith("off: ") and usual["NCCL_CTA_POLICY"].found.startswith("default: ")
    assert "collectives over all" not in nccl(hosts="abcd")["PAT"].found, "ZeRO's have one rank per node, too"
    for scattered in (nccl(size=1), nccl(hosts="abcdabcd", size=2)):
        assert "several ranks of a node" in scattered["PAT"].found and scattered["PAT"].level == Level.LOOK
    assert "disabled" in nccl(NCCL_PAT_ENABLE="0")["PAT"].found and "2.23" in nccl("2.21.5")["PAT"].found
    for quiet in (nccl(hosts="aabb"), nccl(NCCL_ALGO="Ring"), nccl(size=3), nccl(size=1, NCCL_PAT_ENABLE="1")):
        assert "PAT" not in quiet
    setting = {"NCCL_CTA_POLICY": "ZERO", "NCCL_IB_RESILIENCY_PORT_FAILOVER": "1", "NCCL_CROSS_NIC": "1"}
    new, old = nccl("2.29.7", **setting), nccl("2.21.5", **setting)
    assert "ordinary buffers" in new["NCCL_CTA_POLICY"].found and "over another one" in new["port failover"].found
    assert "may cross the rails" in new["NCCL_CROSS_NIC"].found
    assert "ignores it" in old["NCCL_CTA_POLICY"].found and "ignores it" in old["port failover"].found
    assert set(nccl("2.21.5")) == {"PAT"} and "few SMs" in nccl(NCCL_CTA_POLICY="1")["NCCL_CTA_POLICY"].found


def test_a_missing_compiler() -> None:
    tools = {"c++": "/bin/c++", "ninja": "/bin/ninja", "nvcc": "/n"}
    compiler = partial(bad, checks.COMPILER, {"tools": tools, "built": False, "nvcc": "13.0", "torch": "13.1"})
    assert not compiler()
    judged = compiler({"tools": {**tools, "c++": "", "nvcc": ""}, "nvcc": ""})
    assert set(judged) == {"c++", "nvcc"} and "rank 3 (b)" in judged["c++"].found and "CXX" in judged["c++"].advice
    assert "12.4 on rank 0" in compiler({"nvcc": "12.4"}, hosts="a")["version of nvcc"].found


FREE = {"device": 20 * 10**9, "host": 10**11, "shm": 10**10, "locked": -1, "build": "/b", "writable": True}
memory = partial(bad, checks.MEMORY, {**FREE, "disk": 10**11})


def test_too_little_memory() -> None:
    """N-I-G of 1 B parameters on 4 ranks, groups of 2: 2 + 2/2 + 12/4 bytes each, and transient bytes."""
    need, on_host = checks.needed_bytes(Options(params=10**9), GroupSizes(4, 2))
    assert 6e9 < need < 12e9 and on_host == 0
    assert not memory(params=10**9)
    judged = memory({"device": 5 * 10**9}, params=10**9)["for model states"]
    assert judged.level == Level.WRONG
    assert f"N-I-G of 1 B parameters needs {need / 1e9:.1f} GB a rank; free: 5.0 GB (rank 3)" in judged.found
    assert memory(*[{"device": int(1.05 * need)}] * 4, params=10**9)["for model states"].level == Level.LOOK
    less, on_host = checks.needed_bytes(Options(params=10**9, offload_optimizer=True), GroupSizes(4, 2))
    assert 3e9 <= less <= need - 3e9 and on_host == pytest.approx(3e9, rel=0.01)
    judged = memory(*[{"host": 5 * 10**9}] * 4, params=10**9, offload_optimizer=True)["host memory"]
    assert "a has 5.0 GB free, and its 2 rank(s) need 6.0 GB" in judged.found


def test_other_resources() -> None:
    shared = memory(*[{"device": None, "host": 12 * 10**9}] * 4, params=10**9)
    assert "free: 6.0 GB (ranks 0-3)" in shared["for model states"].found, "ranks on a host share its memory"
    judged = memory({"shm": 2**26, "locked": 2**16, "disk": 2**26})
    assert "b has 64 MiB free" in judged["/dev/shm"].found
    assert "RLIMIT_MEMLOCK is 64 KiB on rank 3" in judged["locked memory"].found
    assert judged["build folder"].level == Level.WRONG and "(rank 3)" in judged["build folder"].found
    assert "rank 1 cannot write to /b" in memory({"writable": False}, hosts="aa")["build folder"].found


def test_versions_that_differ_and_patches() -> None:
    versions = partial(bad, checks.VERSIONS, {"versions": {"torch": "2.13", "driver": "580"}, "patches": []})
    assert not versions()
    judged = versions({"versions": {"torch": "2.12", "driver": "570"}, "patches": ["x.y: not applied"]})
    assert judged["torch"].found == "2.13: ranks 0-2; 2.12: rank 3" and judged["torch"].level == Level.WRONG
    assert judged["driver"].level == Level.LOOK
    assert judged["patches"].level == Level.WRONG and "rank 3: x.y: not applied" in judged["patches"].found


def test_clocks_and_copies() -> None:
    assert not bad(links.CLOCKS, {"2": 0.2}, *[None] * 3)
    judged = bad(links.CLOCKS, {"2": -3.5}, *[None] * 3)["clocks"]
    assert judged.level == Level.LOOK and "b (rank 2) -3.5 s" in judged.found
    judged = bad(checks.PINNED, {"to the device": 2e10}, {"to the device": 3e9})["to the device"]
    assert "rank 3 copy at 3 GB/s, the median is 20 GB/s" in judged.found
    assert not bad(checks.PINNED, None)


def test_links_are_plotted() -> None:
    samples = [[2.0**16, 0.002], [2.0**20, 0.01], [2.0**22, 0.04]]
    finding, two, compared = links.judge_hops({0: {"intra": samples, "inter": samples}, 1: None}, launch())
    assert finding.subject == "inside groups" and two.subject == "between groups" and len(finding.details) == 3
    assert finding.details[0].startswith("  64 KiB ####") and finding.details[2].count("#") == 30
    assert "105 MB/s" in finding.found and "64 KiB take 2 ms" in finding.found and "1 times" in compared.found
    assert ranks_text([3]) == "rank 3" and ranks_text([8, 0, 1, 2, 9]) == "ranks 0-2, 8-9"


# What each operator writes, by position.
WRITTEN = {"loco_compress": (1, 3), "loco_decompress": (1,), "loco_difference": (2,), "loco_apply": (1,)}
WRITTEN |= {"lossless_measure": (2,), "lossless_pack": (3,), "lossless_apply": (1,)}


def operators(broken: str = "", position: int = 0) -> Any:
    """The operators, one of which flips the lowest bit of the last byte that it writes."""
    judged = {name: getattr(torch.ops.deepspeed_paro, name) for name in WRITTEN}
    right = judged.get(broken)

    def wrong(*arguments: Any) -> None:
        assert right is not None
        right(*arguments)
        arguments[position].view(-1).view(torch.uint8)[-17 if broken == "lossless_pack" else -1] ^= 1

    return SimpleNamespace(**{**judged, broken: wrong} if broken else judged)


@pytest.mark.parametrize(("name", "position"), [(name, at) for name, places in WRITTEN.items() for at in places])
def test_a_kernel_with_a_wrong_bit_is_named(kernels: bool, name: str, position: int) -> None:
    (judged,) = self_test.differing_operators(operators(name, position), "cpu")
    assert judged.startswith(name)
    assert "error feedback" in judged or position != 3 or name == "lossless_pack"
    answer = {"device": "cpu", "kernels": True, "wrong": [judged, "another (too)"]}
    bad, fine = self_test.judge({0: {"device": "cpu", "kernels": True, "wrong": []}, 1: answer}, launch("ab"))
    assert bad.level == Level.WRONG and bad.subject == judged.split(" (")[0] and bad.found.endswith("another (too)")
    assert name in bad.found and "rank 1 (b)" in bad.found
    assert fine.level == Level.OK and "rank 0" in fine.found


def test_right_kernels_pass_and_missing_ones_are_named(kernels: bool) -> None:
    assert self_test.differing_operators(operators(), "cpu") == []
    (judged,) = self_test.judge({0: {"device": "cpu", "kernels": False, "wrong": []}}, launch("a"))
    assert judged.level == Level.LOOK and "plain PyTorch" in judged.found
