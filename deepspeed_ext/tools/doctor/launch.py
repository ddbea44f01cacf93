# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The ranks of a launch, connected by a store with a time limit before any process group is formed.

If a process group cannot be formed, it does not name the missing ranks; with a store they are known. Answers are also
gathered through the store, so a rank that hangs in a collective, or has died, does not block other ranks' answers.
"""

import json
import math
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from deepspeed_ext.comm.process_groups import ranks_per_node
from deepspeed_ext.strategy import GroupSizes
from deepspeed_ext.tools.doctor.findings import Finding, by_value, ranks_text

if TYPE_CHECKING:
    from torch.distributed import Store

Answers = Mapping[int, Any]  # by rank, without ranks that did not answer
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MARGIN = 10.0  # seconds that other ranks wait longer than rank 0, which reports the missing ranks


class RendezvousError(RuntimeError):
    """Ranks cannot reach each other; the message has the address and the missing ranks."""


@dataclass(frozen=True)
class Options:
    """The options of the command line; see its help. ``skip``: titles of checks to skip."""

    group_size: int | None = None
    timeout: float = 60.0
    params: int | None = None
    strategy: str = "NIG"
    dtype: str = "bf16"
    offload_optimizer: bool = False
    skip: tuple[str, ...] = ()


def _own_store() -> "Store":
    from torch.distributed import HashStore

    return HashStore()


@dataclass(frozen=True)
class Launch:
    """The ranks of a launch, from the view of one rank.

    Attributes:
        rank, local_rank: this rank's number, among all ranks and on its host.
        hosts: name of each rank's host, by rank.
        options: options of the command line.
        environment: environment variables of this rank.
        patch_problems: returns the patches of DeepSpeed that are not as expected.
        store: connects all ranks.
    """

    rank: int
    local_rank: int
    hosts: Sequence[str]
    options: Options = field(default_factory=Options)
    environment: Mapping[str, str] = field(default_factory=dict)
    patch_problems: Callable[[], list[str]] = list
    store: "Store" = field(default_factory=_own_store)

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return len(self.hosts)

    def ranks_of_hosts(self) -> dict[str, list[int]]:
        """Return the ranks of each host, in the order of their first ranks."""
        return dict(sorted(by_value(dict(enumerate(self.hosts))).items(), key=lambda item: item[1][0]))

    def teams(self) -> list[list[int]]:
        """Return the ranks of each host; if all ranks share one host, those of each group instead."""
        hosts = list(self.ranks_of_hosts().values())
        if len(hosts) > 1:
            return hosts
        size = self.options.group_size or ranks_per_node(self.environment) or self.world
        return [list(range(first, min(first + size, self.world))) for first in range(0, self.world, size)]

    def group_sizes(self) -> GroupSizes | None:
        """Return the numbers of all ranks and of ranks in a group; None if no such groups can be formed."""
        try:
            return GroupSizes(self.world, self.options.group_size or math.gcd(*map(len, self.teams())))
        except ValueError:
            return None

    def ranks_with_hosts(self, ranks: Collection[int]) -> str:
        """Return ranks and their hosts as ``ranks 0-3 on node1, node2``."""
        return f"{ranks_text(ranks)} on {', '.join(dict.fromkeys(self.hosts[rank] for rank in sorted(ranks)))}"

    def team_text(self, ranks: Sequence[int]) -> str:
        """Return a team as ``node1 (ranks 8-15)``, without the host if there is only one."""
        text = ranks_text(ranks)
        return f"{self.hosts[ranks[0]]} ({text})" if len(set(self.hosts)) > 1 else text

    def gather(self, key: str, text: str, ranks: Collection[int], seconds: float) -> dict[int, str]:
        """Return on rank 0 the texts of the ``ranks`` that send one in time; empty on other ranks."""
        self.store.set(f"{key}/{self.rank}", text)
        if self.rank:
            return {}
        keys = {rank: f"{key}/{rank}" for rank in ranks}
        try:
            self.store.wait(list(keys.values()), timedelta(seconds=seconds))
        except RuntimeError:
            keys = {rank: name for rank, name in keys.items() if self.store.check([name])}
        return {rank: self.store.get(name).decode() for rank, name in keys.items()}

    def broadcast(self, key: str, text: str, seconds: float) -> str:
        """Return rank 0's text on all ranks.

        Raises:
            RendezvousError: rank 0 sent nothing in time, or is gone.
        """
        if self.rank == 0:
            self.store.set(key, text)
            return text
        try:
            self.store.wait([key], timedelta(seconds=seconds))
            return self.store.get(key).decode()
        except RuntimeError as error:
            host = socket.gethostname()
            raise RendezvousError(
                f"rank {self.rank} on {host} lost contact with rank 0: {_first_line(error)}"
            ) from error

    def broadcast_and_confirm(self, key: str, text: str) -> str:
        """Broadcast rank 0's text. Rank 0 waits until the other ranks have received it."""
        text = self.broadcast(key, text, self.options.timeout + _MARGIN)
        # Rank 0 may serve the store. If it exited earlier, the other ranks could not read the text.
        self.gather(f"{key} received", "", range(self.world), _MARGIN)
        return text


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        examine: runs on every rank and returns plain values for JSON; may raise.
        judge: runs on rank 0, with the answers of all ranks whose ``examine`` returned; does not communicate.
        collective: whether ``examine`` communicates over process groups. It is skipped after such a check failed or a
            rank was lost, since ranks would wait for each other.
        least_seconds: time limit of ``examine`` if ``--timeout`` is shorter.
    """

    examine: Callable[[Launch], Any]
    judge: Callable[[Answers, Launch], list[Finding]]
    collective: bool = False
    least_seconds: float = 0.0


def connect(
    environment: Mapping[str, str], options: Options, patch_problems: Callable[[], list[str]] = list
) -> Launch:
    """Connect the ranks of a launch; without a launcher, this process is the only rank.

    Raises:
        RendezvousError: a variable is not set, or a rank did not connect in time.
    """
    host, local_rank = socket.gethostname(), int(environment.get("LOCAL_RANK", "0"))
    single_rank = Launch(
        rank=0,
        local_rank=local_rank,
        hosts=[host],
        options=options,
        environment=environment,
        patch_problems=patch_problems,
    )
    if int(environment.get("WORLD_SIZE", "1")) == 1:
        return single_rank
    if missing := [name for name in NEEDED if not environment.get(name)]:
        raise RendezvousError(
            f"expected the environment variables {', '.join(NEEDED)}, of which {', '.join(missing)} are not set: "
            f"start it with torchrun or deepspeed, which set them."
        )
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    address = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    launch = replace(single_rank, rank=rank, store=_open_store(environment, rank, address, options.timeout))
    names = launch.gather("host", host, range(world), options.timeout)
    error = ""
    if rank == 0 and (absent := set(range(world)) - set(names)):
        present = "; ".join(f"{host}: {ranks_text(ranks)}" for host, ranks in by_value(names).items())
        error = (
            f"{ranks_text(absent)} of {world} {'is' if len(absent) == 1 else 'are'} missing: {options.timeout:g} s "
            f"after rank 0 began to wait at {address}, only these had connected: {present}. Check that the launcher "
            "runs on every node with the same number of nodes and of ranks per node, and that every node reaches that "
            "address."
        )
    message = json.dumps({"hosts": list(names.values()), "error": error})
    answer = json.loads(launch.broadcast("roll", message, options.timeout + _MARGIN))
    if answer["error"]:
        raise RendezvousError(answer["error"])
    return replace(launch, hosts=answer["hosts"])


def _open_store(environment: Mapping[str, str], rank: int, address: str, timeout: float) -> "Store":
    from torch.distributed import PrefixStore, TCPStore

    # torchrun's agent serves a store at this address; with any other launcher, rank 0 serves it.
    serves = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    name, port, limit = environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), timedelta(seconds=timeout)
    try:
        # Do not wait for the other ranks here: the roll call names the missing ones, a time-out would not.
        store = TCPStore(name, port, is_master=serves, timeout=limit, wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, ValueError) as error:
        reason = "this rank cannot listen there" if serves else "no process answers there"
        raise RendezvousError(
            f"rank {rank} on {socket.gethostname()} could not connect to {address} (MASTER_ADDR:MASTER_PORT) within "
            f"{timeout:g} s; {reason}: {_first_line(error)}. Check that rank 0 has started, that other hosts "
            f"can reach this address, that nothing else uses the port, and that no firewall blocks it."
        ) from error
    return PrefixStore(f"deepspeed_ext doctor {environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
