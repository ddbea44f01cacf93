# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Trains with everything switched on for a long time, and shows that nothing grows.

    python -m tests.campaigns.soak --steps 2000

Four ranks in groups of two train each of ``RUNS``. Between steps, what users do: evaluation, a look at parameters, a
changed learning rate, saving and loading, an early end of the accumulation, an overflow; now and then the engine is
destroyed and made anew (with p = I and G loaded, since DeepSpeed's ZeRO-3 keeps every engine). Behind the first step
after that, each rank counts its tensors' bytes, its resident memory, threads, open files and process groups. After a
fifth of the steps, none may grow.
"""

import argparse
import contextlib
import io
import sys
from typing import Any

from tests.campaigns.fuzz.cases import Block, Case
from tests.campaigns.soak.growth import Sample, growth, soaked
from tests.harness import ranks

ANEW = 40  # steps of an engine
_MODEL = (Block(width=29), Block("unit", 13), Block("tied", 13), Block(frozen=True), Block("norm"))
_SMALL = {"reduce_bucket_size": 300, "allgather_bucket_size": 300, "overlap_comm": True}
_SHARDED = {**_SMALL, "stage3_param_persistence_threshold": 20, "sub_group_size": 100, "stage3_leaf_bytes": True}
_FEW_BITS = {"zeropp_loco_param": {"reset_T": 16}, "paro_quantized_updates": {"resync_T": 16}}
_OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
_OWN_ADAM = {"zero_force_ds_cpu_optimizer": False}
_COMMON: dict[str, Any] = {
    "world": 4,
    "blocks": _MODEL,
    "unused": 11,
    "groups": 2,
    "accumulation": 2,
    "clipping": 0.5,
    "boundary": "user",
}


def placed(name: str, **keys: Any) -> dict[str, Any]:
    """Keys of a strategy in groups of two."""
    return {"paro_strategy": name, "paro_group_size": 2, **keys}


RUNS = {
    "NIG, all in few bits, ahead": Case(
        zero=placed("NIG", **_SMALL, **_FEW_BITS, paro_overlap_updates=True), dtype="bf16", **_COMMON
    ),
    "IIG, units, all in few bits, host": Case(
        zero=placed("IIG", **_SHARDED, **_FEW_BITS, **_OFFLOAD), optimizer="Adam", config=_OWN_ADAM, **_COMMON
    ),
    "GGG, fp16, units, LoCo": Case(
        zero=placed("GGG", **_SHARDED, zeropp_loco_param={"hadamard": True}),
        dtype="fp16",
        config={"fp16": {"loss_scale_window": 20}},  # one of fifty steps overflows, and the scale recovers
        **_COMMON,
    ),
    "NGG, exact, Muon": Case(
        zero=placed("NGG", **_SMALL, paro_quantized_updates={"bits": "exact", "resync_T": 16}),
        dtype="bf16",
        optimizer="Muon",
        **_COMMON,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="of all runs together")
    parser.add_argument("--seed", type=int, default=0, help="of the events")
    arguments = parser.parse_args()
    ranks.prepare_environment()
    pool, wrong = ranks.RankPool(), []
    print(f"{'':<36} engines; from a fifth of them to the last: {', '.join(Sample._fields)}")
    try:
        for name, case in RUNS.items():
            with contextlib.redirect_stdout(io.StringIO()):
                steps = arguments.steps // len(RUNS)
                by_ranks = pool(4).run(soaked, case, steps, ANEW, arguments.seed, timeout=3600.0)
            worst = [
                Sample(*map(max, zip(*at, strict=True))) for at in zip(*(one.samples for one in by_ranks), strict=True)
            ]
            spans = (f"{a:,.0f}-{b:,.0f}" for a, b in zip(worst[len(worst) // 5], worst[-1], strict=True))
            print(f"{name:<36}{len(worst):>8}", *spans, flush=True)
            found = growth(worst)
            if not all(one.finite and one.replicas_equal for one in by_ranks):
                found.append("losses are not finite, or replicas differ")
            wrong += [f"{name}: {what}" for what in found]
    finally:
        pool.close()
    print("\n".join(wrong) or "nothing grows")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
