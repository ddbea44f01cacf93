# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Names of methods and settings that ``tests.perf.cluster`` measures. Imports neither torch nor DeepSpeed."""

from dataclasses import dataclass
from typing import Any

from deepspeed_ext.planner import compression
from deepspeed_ext.strategy import GroupSizes, ModelStates

UNLIMITED = "unlimited"
ADAMW, MUON = "AdamW", "Muon"
FP32, BF16 = "fp32", "bf16"
FORMS = {form.label: form for form in compression.COMPRESSIONS}
_, LOCO, BOTH = FORMS  # suffixes of a strategy's name, as the next two
NATIVE = " (gloo's collectives)"
EMBEDDINGS = " + whole embeddings"  # paro_modules
ORDERED = " + ordered"  # paro_reduce; on gloo, the sums of all strategies are ordered, except with its own collectives
WIDE = " (reduces in fp32)"  # in bf16, where reductions are in bf16 otherwise
SHIPPED = "ZeRO-1 as shipped"  # use_multi_rank_bucket_allreduce true
# How often peers move the model around a ring of all ranks, in a micro-batch and in a step. A gather is a move, and a
# reduce-scatter. hpZ gathers once in some steps only.
MOVES: dict[str, tuple[int, int] | None] = {
    **{"ZeRO-1": (0, 2), "ZeRO-2": (1, 1), "ZeRO-3": (3, 0), "FSDP2": (3, 0)},
    **{"FSDP2 node": (2, 0), "FSDP2 kept": (0, 2), "ZeRO-3 defaults": (2, 0), "hpZ": None},
    **{"DDP": (0, 2), SHIPPED: (0, 3)},
}
RINGS = tuple(name for name in MOVES if name not in ("DDP", SHIPPED))  # gloo's own reductions have other bytes
HSDP_REDUCTIONS = {  # parameters from forward to backward, and the dtype of reductions: beside bf16 only
    f"HSDP{suffix} (reduces in {short})": (between, dtype)
    for suffix, between in ((" kept", "whole"), ("", "cut"))
    for short, dtype in ((FP32, "float32"), (BF16, "bfloat16"))
}
SIZES = {  # blocks, their width, and the width of their hidden layer
    "large": (4, 512, 2048),
    "small": (4, 256, 1024),
    "curve": (4, 128, 1024),
    "paper": (8, 256, 100),
    "narrow": (8, 256, 400),  # whose compute is nothing beside its messages
    "two": (2, 512, 1024),
    "25M": (12, 512, 2048),
    "200M": (24, 1024, 4096),
}


def rate_name(mbit: float | None) -> str:
    """Return a rate as it is written in files and tables."""
    return UNLIMITED if mbit is None else f"{mbit:g}"


@dataclass(frozen=True)
class Setting:
    """A model on an emulated cluster, in groups of a node."""

    name: str
    nodes: int = 2
    ranks_per_node: int = 2
    accumulation: int = 4
    mbit: tuple[float | None, ...] = (100,)  # rates of a node's link, in turn
    size: str = "large"  # a key of ``SIZES``, of models of blocks
    optimizer: str = ADAMW
    dtype: str = FP32
    lora: bool = False  # adapters of rank 1 are trained beside frozen blocks

    @property
    def sizes(self) -> GroupSizes:
        return GroupSizes(self.nodes * self.ranks_per_node, self.ranks_per_node)

    @property
    def states(self) -> ModelStates:
        """Bytes of the model in fp32."""
        blocks, width, hidden = SIZES[self.size]
        frozen = 2 * blocks * width * hidden
        if not self.lora:
            return ModelStates.of(frozen, parameter_bytes=4, gradient_bytes=4)
        adapters = 2 * blocks * (width + hidden)
        return ModelStates.of(frozen + adapters, adapters, parameter_bytes=4, gradient_bytes=4)

    def peer_bytes(self, name: str) -> float | None:
        """Return the bytes that a node sends in a step of a peer that gathers for each use, if there is a formula."""
        moves, model = MOVES.get(name), self.states.parameters / (2 if self.dtype == BF16 else 1)
        if self not in (*BLOCKS.values(), *NETWORK.values()) or self.optimizer == MUON:
            return None
        if name.startswith("HSDP"):  # an all-reduce of shards between nodes
            return 2 * (1 - 1 / self.nodes) * model * (2 if self.dtype == BF16 and name.endswith(f"{FP32})") else 1)
        # After the last of several backwards, FSDP2 gathers the last block for another one that does not come.
        in_vain = 1 / SIZES[self.size][0] if name.startswith("FSDP2") and self.accumulation > 1 else 0
        return moves and (self.accumulation * moves[0] + moves[1] + in_vain) * (1 - 1 / self.sizes.ranks) * model


def by_name(*settings: Setting) -> dict[str, Setting]:
    return {setting.name: setting for setting in settings}


RATES = (100, 500, None)
RATIOS = (0.5, 1.0, 2.0)  # of W to the compute of a micro-batch
BLOCKS = by_name(
    Setting("2x2-large-4", mbit=RATES),
    Setting("2x2-small-1", accumulation=1, mbit=RATES, size="small"),
    Setting("2x2-small-4", mbit=RATES, size="small"),
    Setting("2x2-small-16", accumulation=16, mbit=RATES, size="small"),
    Setting("4x2-small-4", nodes=4, mbit=RATES, size="small"),
    Setting("2x2-large-4-muon", mbit=RATES, optimizer=MUON),
    Setting("2x2-large-4-bf16", dtype=BF16),
)
OVERLAP = by_name(*(Setting(f"{n}x2-{s}", nodes=n, accumulation=s, size="narrow") for n in (2, 4) for s in (1, 4)))
OFFLOAD = by_name(
    Setting("2x2-full-100"),
    Setting("2x2-LoRA-100", lora=True),
    Setting("2x2-LoRA-15", mbit=(15,), size="two", lora=True),
)
NETWORK = by_name(Setting("2x2-curve-4", mbit=(5, 10, 25, 50, 100, 500, 2000, None), size="curve"))
COLLECTIVES = by_name(*(Setting(f"{nodes}x{16 // nodes}", nodes, 16 // nodes, mbit=(200,)) for nodes in (2, 4, 8)))
OUTER = by_name(
    *(
        Setting(f"2x{ranks}-{rate_name(rate)}", ranks_per_node=ranks, accumulation=1, mbit=(rate,))
        for ranks in (1, 2)
        for rate in (None, 100, 20, 5)
    )
)
SPEEDS = by_name(Setting("2x2-speeds", accumulation=6, mbit=(1000, 100), size="narrow"))
MIXTURE = by_name(Setting("2x2-100"))
PIPELINE = by_name(Setting("4x2-pipeline", nodes=4, accumulation=8, mbit=(100, 1000)))
GPT2 = by_name(Setting("2x2-gpt2", mbit=(100, 1000), dtype=BF16), Setting("2x2-tiny", mbit=(100, 1000), dtype=BF16))
SAVES = by_name(
    Setting("2x2-25M-1000", mbit=(1000,), size="25M", dtype=BF16),
    Setting("2x2-25M-100", size="25M", dtype=BF16),
    Setting("2x2-200M-1000", mbit=(1000,), size="200M", dtype=BF16),
)
_ASYNC = {"async_save": True}
SAVE_SECTIONS: dict[str, dict[str, Any]] = {  # ``checkpoint`` of the configuration, by method
    "ZeRO-2": {},
    "ZeRO-3": {},
    "NIG": {},
    "NIG, asynchronous": _ASYNC,
    "IIG": {},
    "IIG, without digests": {},
    "IIG, asynchronous": _ASYNC,
}
