# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How ranks of the doctor find one another: over a store with a time limit, before any process group is formed.

A process group that cannot be formed says neither who is missing nor where ranks were to meet. A store does. What
ranks answer travels over it, too, so a rank that hangs in a collective, or has died, does not take others' answers
along.
"""

import json
import socket
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from deepspeed_ext.tools.doctor.findings import ranks_text

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LATER = 10.0  # seconds that a rank waits longer than the first one, which says who is missing


class CannotMeet(RuntimeError):
    """The ranks do not find one another; the message says where they were to meet, and who is missing."""


class Meeting:
    """All ranks, connected by a store.

    Attributes:
        rank: this rank's number.
        hosts: name of each rank's host.
        store: for process groups.
    """

    def __init__(self, store: Store, rank: int, hosts: list[str]) -> None:
        self.store, self.rank, self.hosts = store, rank, hosts

    def say(self, name: str, text: str) -> None:
        """Tell all ranks a text, which they hear under this name."""
        self.store.set(name, text)

    def hear(self, name: str, seconds: float) -> str:
        """Return what the first rank says under this name.

        Raises:
            CannotMeet: it says nothing in time, or has gone.
        """
        try:
            self.store.wait([name], timedelta(seconds=seconds))
            return self.store.get(name).decode()
        except RuntimeError as error:
            raise CannotMeet(f"rank 0 on {self.hosts[0]} says nothing any more: {_first_line(error)}") from error

    def answer(self, name: str, text: str) -> None:
        """Give this rank's answer to a question."""
        self.store.set(f"{name}/{self.rank}", text)

    def answers(self, name: str, ranks: Collection[int], seconds: float) -> dict[int, str]:
        """Return the answers of these ranks; of those that do not answer in time, nothing."""
        keys = {rank: f"{name}/{rank}" for rank in ranks}
        there = _there(self.store, keys, seconds)
        return {rank: self.store.get(keys[rank]).decode() for rank in there}


def meet(environment: Mapping[str, str], timeout: float) -> Meeting:
    """Meet the other ranks of the launch; without a launcher, this process is the only one.

    Args:
        environment: has what a launcher sets.
        timeout: seconds after which a rank is missing.

    Raises:
        CannotMeet: see there.
    """
    host = socket.gethostname()
    if int(environment.get("WORLD_SIZE", "1")) == 1:
        return Meeting(HashStore(), 0, [host])
    lacking = [name for name in NEEDED if not environment.get(name)]
    if lacking:
        raise CannotMeet(
            f"expected the environment variables {', '.join(NEEDED)}, of which {', '.join(lacking)} are not set: "
            f"start it with torchrun or deepspeed, which set them."
        )
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    where = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    store = _connect(environment, rank, host, where, timeout)
    store.set(f"host/{rank}", host)
    if rank == 0:
        _call_the_roll(store, world, where, timeout)
    try:
        store.wait(["roll"], timedelta(seconds=timeout + _LATER))
        roll: dict[str, Any] = json.loads(store.get("roll"))
    except RuntimeError as error:
        raise CannotMeet(f"rank 0 has gone from {where}, says rank {rank} on {host}: {_first_line(error)}") from error
    if "missing" in roll:
        raise CannotMeet(roll["missing"])
    return Meeting(store, rank, roll["hosts"])


def _connect(environment: Mapping[str, str], rank: int, host: str, where: str, timeout: float) -> Store:
    # torchrun's agent listens at this address for its ranks; with any other launcher the first rank does.
    by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = rank == 0 and not by_agent
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    seconds = timedelta(seconds=timeout)
    try:
        store = TCPStore(address, port, is_master=listens, timeout=seconds, wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, ValueError) as error:
        who = "this rank, which is to listen there, cannot" if listens else "nobody answers there"
        raise CannotMeet(
            f"rank {rank} on {host} did not get to {where} (MASTER_ADDR:MASTER_PORT) within {timeout:g} s; {who}: "
            f"{_first_line(error)}. Check that rank 0 has started, that the address is that of its host as others see "
            f"it, that nothing else uses the port, and that no firewall closes it."
        ) from error
    return PrefixStore(f"deepspeed_ext doctor {environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _call_the_roll(store: Store, world: int, where: str, timeout: float) -> None:
    keys = {rank: f"host/{rank}" for rank in range(world)}
    there = _there(store, keys, timeout)
    hosts = {rank: store.get(keys[rank]).decode() for rank in there}
    missing = sorted(set(keys) - set(there))
    if not missing:
        store.set("roll", json.dumps({"hosts": [hosts[rank] for rank in range(world)]}))
        return
    came: dict[str, list[int]] = {}
    for rank, host in hosts.items():
        came.setdefault(host, []).append(rank)
    said = "; ".join(f"{host}: {ranks_text(ranks)}" for host, ranks in came.items())
    verb = "is" if len(missing) == 1 else "are"
    text = (
        f"{ranks_text(missing)} of {world} {verb} missing: {timeout:g} s after rank 0 began to wait at {where}, only "
        f"these had come: {said}. Check that the launcher runs on every node with the same number of nodes and of "
        f"ranks per node, and that every node reaches that address."
    )
    store.set("roll", json.dumps({"missing": text}))


def _there(store: Store, keys: Mapping[int, str], seconds: float) -> list[int]:
    """Return whose keys are in the store, of all or after so many seconds."""
    if not keys:
        return []
    try:
        store.wait(list(keys.values()), timedelta(seconds=seconds))
    except RuntimeError:
        return [rank for rank, key in keys.items() if store.check([key])]
    return list(keys)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
