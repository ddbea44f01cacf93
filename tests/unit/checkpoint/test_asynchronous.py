# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Saves that go on beside the training have what saves at once have, wherever they are called, whatever comes next."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.tiers import deep
from tests.harness.training import PARTITIONED, REPLICATED

ALL = (*REPLICATED, *PARTITIONED)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
FEW_BITS: dict[str, Any] = {"zeropp_loco_param": {}, "paro_quantized_updates": {}}
EVERYTHING = {**FEW_BITS, "paro_overlap_updates": True, "overlap_comm": True}
OUTER = {"paro_outer_optimizer": {"steps": 2}}


ROWS = [
    ("NIG", "fp32", EVERYTHING, "Adam"),
    ("IIG", "bf16", FEW_BITS, "Adam"),
    ("NIG", "bf16", {}, "Muon"),
    ("III", "bf16", OUTER, "Adam"),
    ("NII", "fp16", OFFLOAD, "Adam"),
]
DEEP = [(name, dtype, zero, "Adam") for name in ALL for dtype in ("fp32", "bf16", "fp16") for zero in ({}, OFFLOAD)]
DEEP += [(name, "bf16", {}, "Muon") for name in ALL]
DEEP += [(name, "bf16", FEW_BITS, "Adam") for name in ("NGG", "NIG", "IIG", "ING", "IGG")]
DEEP += [(name, "fp32", EVERYTHING, "Adam") for name in ("NGG", "NNG")]
DEEP += [(name, dtype, OUTER, "Adam") for name in ("III", "NII", "INI", "NNI") for dtype in ("fp32", "bf16")]


@pytest.mark.parametrize("name, dtype, zero, optimizer", [*ROWS, *deep(*DEEP)])
def test_files_are_those_of_saves_at_once(
    ranks: Any, tmp_path: Path, name: str, dtype: str, zero: dict[str, Any], optimizer: str
) -> None:
    for found in ranks(4).run(twins_case, str(tmp_path), name, dtype, zero, optimizer):
        assert found.different == [] and found.files >= 28 and found.same, tuple(found)


def twins_case(folder: str, name: str, dtype: str, zero: dict[str, Any], optimizer: str) -> Any:
    """See ``saves.py``."""
    from tests.harness import saves

    return saves.twins_case(folder, name, saves.job_of_row(dtype, zero, optimizer))


DIVIDED = ("NIG", "IIG", "III", "GNG", "NNN")


@pytest.mark.parametrize(
    "name, dtype, optimizer",
    [("NIG", "bf16", "Adam"), *deep(*((name, "bf16", kind) for name in DIVIDED for kind in ("Adam", "Muon")))],
)
def test_files_of_experts_are_those_of_saves_at_once(
    ranks: Any, tmp_path: Path, name: str, dtype: str, optimizer: str
) -> None:
    for found in ranks(4).run(experts_case, str(tmp_path), name, dtype, optimizer):
        assert found.different == [] and found.files >= 28 and found.same, tuple(found)


def experts_case(folder: str, name: str, dtype: str, optimizer: str) -> Any:
    """AutoEP's, divided among two ranks."""
    from tests.harness import experts, saves, training

    zero = {"reduce_bucket_size": 3000, "allgather_bucket_size": 3000, "stage3_param_persistence_threshold": 0}
    job = training.Job(
        sizes=(13, 7),
        network=experts.SmallMixtral,
        optimizer=optimizer,
        zero=zero,
        config={**saves.ASIDE, **experts.autoep(2)},
        dtype=dtype,
        accumulation=2,
    )
    return saves.twins_case(folder, name, job)


@pytest.mark.parametrize(
    "name, optimizer, experts",
    [("NIG", "Adam", 0), *deep(("IIG", "Adam", 0), ("NNI", "Adam", 0), ("NIG", "Muon", 0), ("NIG", "Adam", 2))],
)
def test_files_of_pipelines_are_those_of_saves_at_once(
    ranks: Any, tmp_path: Path, name: str, optimizer: str, experts: int
) -> None:
    for found in ranks(4).run(pipeline_case, str(tmp_path), name, optimizer, experts):
        assert found.different == [] and found.files >= 28 and found.same, tuple(found)


def pipeline_case(folder: str, name: str, optimizer: str, experts: int) -> Any:
    """Of two stages."""
    from tests.harness import pipelines, saves

    pipe = pipelines.Pipe(dtype="bf16", optimizer=optimizer, experts=experts, config=saves.ASIDE)
    return saves.pipeline_case(folder, name, pipe, 1)


@pytest.mark.parametrize("names", [("NIG", "NII", "IIG"), *deep((ALL,))])
def test_states_stay_where_they_are_and_host_memory_is_made_once(ranks: Any, names: tuple[str, ...]) -> None:
    for rank, rows in enumerate(ranks(4).run(memory_case, names)):
        for name, held, written, addresses, received, alive, more, due in rows:
            wrote = {"N": 1, "I": 2, "G": 4}[name[2]] > rank  # others have replicas
            assert held[0] <= written <= 1.02 * held[0] + 30_000 * wrote and (held[0] > 0) == wrote, (name, held)
            assert held == [held[0]] * 3 and addresses == 1 and alive == 0, (name, held, addresses, alive)
            given = 4000 * (wrote and (rank == 0 or name[0] != "N"))  # in the file of weights, which not all have
            assert more == [held[0] + given, held[0]], (name, held, more)
            # Nor are slices gathered; DeepSpeed gathers persistent parameters again, inside groups.
            assert received < (0.02 if name[0] == "N" else 0.1) * due, (name, received, due)


def memory_case(names: tuple[str, ...]) -> list[tuple[str, list[int], int, int, int, int, list[int], int]]:
    """Of three saves bytes of host memory, bytes of files, how many sets of addresses there were, bytes received, and
    how many snapshots live after them; bytes of host memory after a larger save and the next one; of the optimizer's
    states."""
    import tempfile
    import weakref

    import torch
    from deepspeed import comm as dist

    from deepspeed_ext.checkpoint import snapshots as copies
    from scripts.emulation.traffic import TrafficMeter
    from tests.harness import saves, snapshots, training

    job = training.Job(sizes=(128, 512, 256), optimizer="Adam", empty=False, config=saves.ASIDE)
    rows = []
    for name in names:
        engine, model = training.make_engine(job, training.placed(name))
        snapshots.run(engine, job, snapshots.steps_of(job, 1))
        if name[0] != "N":
            engine.optimizer.drain_parameters()
        files, made = engine.checkpoint_engine, weakref.WeakSet[copies.Snapshot]()
        buffers, meter = files.aside.buffers, TrafficMeter()
        take = files.aside.snapshot
        files.aside.snapshot = lambda *args, take=take, made=made: made.add(one := take(*args)) or one
        write, paths = files.write, set[str]()
        files.write = lambda *args, write=write, paths=paths: paths.add(args[2]) or write(*args)
        with tempfile.TemporaryDirectory() as own:
            shared = [own]
            dist.broadcast_object_list(shared, 0)
            folder, held, addresses = Path(shared[0]), [], set()
            for number in range(3):
                dist.barrier()
                if number:
                    meter.start()
                dist.barrier()
                engine.save_checkpoint(folder, "tag")
                files.finish()
                meter.stop()
                held.append(buffers.nbytes)
                addresses.add(tuple(sorted(one.data_ptr() for many in buffers._free.values() for one in many)))
            received = sum(meter.read()[dist.get_rank()])
            written = sum((folder / "tag" / Path(path).name).stat().st_size for path in paths)
            alive, more = len(made), []
            for extra in ({"more": torch.zeros(1000)}, {}):  # the second frees what the first alone had
                engine.save_checkpoint(folder, "tag", extra)
                files.finish()
                more.append(buffers.nbytes)
            dist.barrier()
        due = 12 * sum(getattr(param, "ds_numel", param.numel()) for param in model.parameters())
        rows.append((name, held, written, len(addresses), received, alive, more, due))
        engine.destroy()
    return rows


def test_files_one_after_the_other_have_what_they_are_given(ranks: Any) -> None:
    """What one file has may be gone, and its memory used again, when the next one is taken; storages stay shared."""
    assert ranks(1).run(taken_case) == [(list(range(5)), True, [1.0, 7.0])]


def taken_case() -> tuple[list[int], bool, list[float]]:
    """First elements of tensors that live in one place one after the other; whether two that share a storage do so in
    what was taken; one that only steps change, before and after it is completed."""
    import torch

    from deepspeed_ext.checkpoint.snapshots import HostBuffers, Snapshot

    late, memory, taken = torch.ones(1000), bytearray(4000), []
    snapshot = Snapshot(HostBuffers(), [late])
    for number in range(5):
        taken.append(snapshot.take({"it": torch.frombuffer(memory, dtype=torch.float32).fill_(number)})["it"])
    two = snapshot.take([late, late[3:].view(-1), late.new_zeros(3)])
    snapshot.seal()
    before = float(late[0])
    late.fill_(7.0)  # as a step would that does not wait
    snapshot.complete()
    shared = two[0].untyped_storage().data_ptr() == two[1].untyped_storage().data_ptr()
    return [int(one[0]) for one in taken], shared, [before, float(two[0][0])]
