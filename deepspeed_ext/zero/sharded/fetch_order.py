# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compares the modules whose parameters ranks gather together, before they gather.

Ranks that gather different modules would exchange messages of different sizes, or wait for each other. The comparison
goes through torch's store, so it needs no collective that such a rank would miss: each rank writes the name of a
module, and reads the names of the others. This takes a round trip for each module, so it is done in the first forwards
and backwards only, or always with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``; and not with more than 64 ranks.
"""

from datetime import timedelta
from typing import Any

from deepspeed import comm as dist
from torch import distributed, nn
from torch.distributed import DistStoreError, PrefixStore, ProcessGroup, distributed_c10d

from deepspeed_ext.comm.agreement import unique_number
from deepspeed_ext.comm.disjoint_groups import timeout_of
from deepspeed_ext.comm.process_groups import data_parallel_ranks
from deepspeed_ext.config.keys import MODULES, SECTION

_FORWARDS = 3  # that are compared
_MOST_RANKS = 64  # with more, a comparison takes too long


class FetchOrder:
    """The modules of one model, in the order in which a rank gathers their parameters.

    The constructor is collective over ``group``.

    Args:
        group: the ranks that gather together, as ``is_possible`` accepts them; None for all ranks.
        model: the model.
    """

    def __init__(self, group: ProcessGroup | None, model: nn.Module) -> None:
        self._ranks, self._rank = data_parallel_ranks(group), dist.get_rank()
        self._names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        self._timeout: timedelta = timeout_of(group) or distributed_c10d.default_pg_timeout
        self._always = distributed.get_debug_level() == distributed.DebugLevel.DETAIL
        self._forwards, self._count = 0, 0
        store: Any = distributed_c10d._get_default_store()  # torch's stubs lack ``clone``
        # A copy, because a store serves one thread at a time: the thread of a save may wait for a key of another rank,
        # whose own thread waits for this one.
        self._store = PrefixStore(f"deepspeed_ext/fetches/{unique_number(group)}", store.clone())

    @staticmethod
    def is_possible(group: ProcessGroup | None) -> bool:
        """Whether the ranks of a group can be compared. With torch's "fake" backend there are no other ranks."""
        return 1 < len(data_parallel_ranks(group)) <= _MOST_RANKS and distributed.get_backend(group) != "fake"

    @property
    def is_compared(self) -> bool:
        """Whether modules are compared now."""
        return self._always or self._forwards <= _FORWARDS

    def begin_forward(self) -> None:
        """Count a forward."""
        self._forwards += 1

    def compare(self, module: nn.Module) -> None:
        """Compare the next module with those of the other ranks.

        Raises:
            RuntimeError: they gather other modules, on all ranks; or a rank gathers nothing before the timeout.
        """
        if id(module) not in self._names:
            return
        self._count += 1
        self._store.set(self._key(self._rank), self._names[id(module)])
        others = [self._key(rank) for rank in self._ranks]
        try:
            self._store.wait(others, self._timeout)
        except DistStoreError as error:
            raise RuntimeError(self._message(self._present())) from error
        names = dict(zip(self._ranks, self._store.multi_get(others), strict=True))
        if len(set(names.values())) > 1:
            raise RuntimeError(self._message({rank: name.decode() for rank, name in names.items()}))

    def _key(self, rank: int) -> str:
        return f"{self._count}/{rank}"

    def _present(self) -> dict[int, str]:
        keys = {rank: self._key(rank) for rank in self._ranks}
        return {
            rank: self._store.get(key).decode() if self._store.check([key]) else f"nothing within {self._timeout}"
            for rank, key in keys.items()
        }

    def _message(self, names: dict[int, str]) -> str:
        by_name: dict[str, list[int]] = {}
        for rank, name in names.items():
            by_name.setdefault(name, []).append(rank)
        modules = "; ".join(f"{name} on ranks {ranks}" for name, ranks in by_name.items())
        return (
            f"The ranks {self._ranks}, which gather parameters together, gather different modules: {modules}. Keep "
            f"modules that only some ranks run whole, by a pattern in {SECTION}.{MODULES}; or run them on all of "
            f"these ranks, in one order; or put experts, of which each rank runs others, into a leaf module "
            f"({SECTION}.leaf_module)."
        )
