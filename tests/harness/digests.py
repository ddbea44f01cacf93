# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Trains with each feature on four ranks, and prints the weights' digests.

Two interpreters run it, one with the package and stock DeepSpeed and one with the fork; both must print the same:

    python -m tests.harness.digests save FOLDER     trains a job, too, and saves on the way
    python -m tests.harness.digests resume FOLDER   continues it from there, and must end at the same weights
"""

import hashlib
import json
import sys
from typing import Any

SMALL = {"reduce_bucket_size": 300, "allgather_bucket_size": 300, "stage3_param_persistence_threshold": 0}


def digest(tensors: list[Any]) -> str:
    """Of the bits."""
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


def digest_case() -> dict[str, str]:
    """A digest for each feature, and where the code of the optimizer comes from."""
    import torch

    from tests.harness import mixtures, pipelines, training
    from tests.harness.training import Job, placed

    torch.use_deterministic_algorithms(True)
    loco = {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 3}}
    wide = {"sizes": (64, 96, 64), "steps": 4, "zero": SMALL}
    jobs = {
        "stock ZeRO-2": (Job(zero=SMALL), {"stage": 2}),
        "NIG": (Job(accumulation=2, groups=2, zero=SMALL), placed("NIG")),
        "IIG, bf16": (Job(accumulation=2, dtype="bf16", optimizer="Adam", zero=SMALL), placed("IIG")),
        "IGG + LoCo": (Job(accumulation=2, **wide), placed("IGG", **loco)),
        "NNG + LoCo": (Job(**wide), placed("NNG", **loco)),
        "units": (
            Job(network=mixtures.Mixtures, optimizer="Adam", empty=False, steps=2, zero=SMALL),
            {"stage": 3, "stage3_leaf_bytes": 12_000},
        ),
        "threshold": (
            Job(network=mixtures.Mixtures, optimizer="Adam", empty=False, steps=2, zero=SMALL),
            {"paro_strategy": "GGG", "stage3_module_granularity_threshold": 60},
        ),
    }
    found = {}
    for name, (job, zero) in jobs.items():
        kinds: list[str] = []
        record = training.train(job, zero, lambda engine, kinds=kinds: kinds.append(type(engine.optimizer).__module__))
        found[name] = digest([record.weights])
        found[f"module of {name}"] = kinds[0]
    for stage in (2, 3):
        piped = pipelines.train_pipeline(pipelines.Pipe(zero=SMALL), {"stage": stage})
        found[f"pipeline with ZeRO-{stage}"] = digest(list(piped.weights.values()))
    return found


def resumed_case(folder: str, resume: bool) -> str:
    """A digest of the weights after four steps; two of them come before a checkpoint."""
    from tests.harness import training
    from tests.harness.training import Job, placed

    job = Job(sizes=(64, 96, 64), zero=SMALL)
    engine, model = training.make_engine(job, placed("NIG", zeropp_loco_param={"err_beta": 0.8}))
    data = training.batches(job)
    for number in range(4):
        batch = next(data)
        if number == 2 and resume:
            assert engine.load_checkpoint(folder)[0] is not None
        elif number == 2:
            engine.save_checkpoint(folder)
        if number >= 2 or not resume:
            training.micro_step(engine, job, number, *batch)
            engine.step()
    weights = training.whole_weights(model)
    engine.destroy()
    return digest([weights])


def main() -> None:
    from tests.harness import digests, ranks  # this module by the name that ranks know it by

    ranks.prepare_environment()
    pool, kind, folder = ranks.RankPool(), *sys.argv[1:]
    try:
        ends = pool(4).run(digests.resumed_case, folder, kind == "resume")
        features = pool(4).run(digests.digest_case)
    finally:
        pool.close()
    print(json.dumps({"ends": ends, "features": features}))


if __name__ == "__main__":
    main()
