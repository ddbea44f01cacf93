# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checks of experiment T11: checkpoints that are copied from a GPU and written during training; exports. Copies are
made late, so that a step that does not wait for them, or a thread that reads them too early, is seen in the files: see
``late``."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.checkpoint.host_writer import HostWriter
from deepspeed_ext.checkpoint.snapshots import Snapshot
from tests.campaigns.gpu.one_by_one import Case, run_cases
from tests.campaigns.gpu.order import pause
from tests.harness import calls, memory_saves, saves, snapshots, training
from tests.harness.device_on_host import cases
from tests.harness.fake_wire import WITHOUT_TIMER

BEHIND, AT_ONCE = 100, 1  # milliseconds by which copies are late
VERY_LATE = 700  # milliseconds: longer than a step
FEW_BITS: dict[str, Any] = {"zeropp_loco_param": {}, "paro_quantized_updates": {}}
EVERYTHING = {**FEW_BITS, "paro_overlap_updates": True, "overlap_comm": True}
OUTER: dict[str, Any] = {"paro_outer_optimizer": {"steps": 2}}
TWINS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("NIG", "bf16", {}, "Adam"),
    ("IIG", "bf16", {"overlap_comm": True}, "Adam"),
    ("NII", "fp16", cases.PAGEABLE, "Adam"),
    ("NIG", "bf16", cases.PINNED, "Adam"),
    ("NIG", "bf16", {}, "Muon"),
    ("III", "bf16", OUTER, "Adam"),
    ("IIG", "bf16", FEW_BITS, "Adam"),
    ("NIG", "fp32", EVERYTHING, "Adam"),
)
RESUMED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("IIG", {}, "Adam"),
    ("NII", cases.PINNED, "Muon"),
    ("III", OUTER, "Adam"),
    ("NIG", FEW_BITS, "Adam"),
)
ALONE: tuple[str, str, dict[str, Any], str] = ("GGG", "bf16", {}, "Adam")
IN_MEMORY = (("NIG", 0), ("IIG", 1), ("NIG + LoCo", 1))
EXPORTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("NIG", {"asynchronous": True}),
    ("IIG", {"asynchronous": True}),
    ("IIG", {"host_bytes": 512}),  # far less than the weights: buffers are filled again and again
)


def aside(setup: Any) -> None:
    """T11: check that asynchronous saves on a GPU write the files of synchronous saves."""
    subset = 1 if setup.small else None
    created = [
        Case("pinned memory", _memory),
        Case("without the wait", _seen_without_the_wait),
        *(Case(f"files, {_title(*row)}", partial(_twins, row=row)) for row in TWINS[:subset]),
        *(Case(f"export, {name} {how}", partial(_exported, name=name, how=how)) for name, how in EXPORTS[:subset]),
        Case("export without the wait", _seen_without_the_event),
        *(Case(f"in memory, {name}", partial(_in_memory, name=name, node=node)) for name, node in IN_MEMORY[:subset]),
        *(Case(f"resumed, {_title(*row)}", partial(_resumed, row=row)) for row in RESUMED[:subset]),
    ]
    # Those that may have to wait for kernels to be built come last.
    slow = [dataclasses.replace(case, limit=150) for case in created if "loco" in case.name.lower()]
    run_cases(setup, [*(case for case in created if "loco" not in case.name.lower()), *slow])
    run_cases(setup, [Case("files over NCCL", partial(_twins, row=ALONE, group_size=1))], alone=True)


def _title(*row: Any) -> str:
    return " ".join(str(part) for part in row if part)


@contextlib.contextmanager
def late(setup: Any, milliseconds: float = BEHIND) -> Iterator[list[int]]:
    """Within this context, a stream sleeps before it copies; yields how many copies each save makes behind the steps.
    On the host a thread copies late instead: ``saves.late_copies``."""
    copy, behind = Snapshot._copy_on_stream, list[int]()

    def copied(self: Any, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        copy(self, [])  # makes the stream
        with get_accelerator().stream(self._stream):
            pause(setup, milliseconds if pairs is self._on_device else AT_ONCE)
        copy(self, pairs)

    with (
        mock.patch.object(Snapshot, "_copy_on_stream", copied),
        calls.before(Snapshot, "start_device_copies", lambda snapshot: behind.append(len(snapshot._on_device))),
        calls.before(HostWriter, "put", lambda *_, **__: pause(setup, AT_ONCE)),
    ):
        yield behind


def _job_of(dtype: str, zero: dict[str, Any], optimizer: str = "Adam") -> training.Job:
    """Return the training; DeepSpeed's timer would wait for all streams, so that no one else would have to."""
    job = saves.job_of_row(dtype, zero, optimizer)
    return dataclasses.replace(job, config={**job.config, **WITHOUT_TIMER})


def _twins(setup: Any, row: tuple[str, str, dict[str, Any], str], group_size: int = 2) -> None:
    """Compare files, and losses, of a run that saves at every turn."""
    name, dtype, zero, optimizer = row
    with snapshots.shared_folder() as folder, late(setup) as behind:
        results = saves.twins_case(folder, name, _job_of(dtype, zero, optimizer), group_size)
    setup.report.check("the same files", results.different == [] and results.files >= 28)
    if results.different:
        setup.report.figure("where they differ", results.different[:5])
    setup.report.check("the same losses and errors", results.same)
    setup.report.figure("files", results.files)
    elsewhere = "offload_optimizer" in zero or "paro_outer_optimizer" in zero
    setup.report.check("the device copies behind the steps", (sum(behind) > 0) == (setup.cuda and not elsewhere))


class _Short(saves.Run):
    """Steps and saves in turn."""

    def everything(self) -> None:
        """Save after a step, and step at once."""
        for number in range(3):
            self.step()
            self.save(str(number))
        self.step()


def _seen_without_the_wait(setup: Any) -> None:
    """See that files differ if steps do not wait for copies: otherwise these checks would show nothing."""
    for waits in (True, False):
        settle = Snapshot.wait_for_copies if waits else lambda self: None
        patched = mock.patch.object(Snapshot, "wait_for_copies", settle)
        with snapshots.shared_folder() as folder, late(setup, VERY_LATE), saves.late_copies(VERY_LATE / 1e3), patched:
            results = saves.twins_case(folder, "NIG", _job_of("bf16", {}), kind=_Short)
        title = "files are the same with the wait" if waits else "files differ without the wait"
        setup.report.check(title, results.files > 0 and (results.different == []) == waits)


def _memory(setup: Any) -> None:
    """See that host memory is pinned where there is a GPU, and made once."""
    job, pinned = training.Job(optimizer="Adam", empty=False, config=saves.ASIDE), set[bool]()
    at: list[set[int]] = []
    engine, _ = training.make_engine(job, training.placed("GGG"))  # all ranks write
    with snapshots.shared_folder() as folder:
        for number in range(3):
            snapshots.run(engine, job, snapshots.steps_of(job, 1))
            engine.save_checkpoint(folder, str(number))
            engine.checkpoint_engine.finish()
            free = engine.checkpoint_engine.async_saves.buffers._free
            retained = [item for group in free.values() for item in group]
            pinned |= {item.is_pinned() for item in retained}
            at.append({item.data_ptr() for item in retained})
        with calls.after(HostWriter, "_next_buffer", lambda buffer, _: pinned.add(buffer.bytes.is_pinned())):
            import deepspeed_ext

            deepspeed_ext.export_weights(engine, f"{folder}/weights", writers=1)
    engine.destroy()
    setup.report.check("pinned if there is a GPU", pinned == {setup.cuda})
    setup.report.check("made once", bool(at[0]) and at == [at[0]] * 3)


def _exported(setup: Any, name: str, how: dict[str, Any]) -> None:
    with snapshots.shared_folder() as folder, late(setup):
        changed = cases.exported(f"{folder}/weights", name, **how)
    setup.report.check("the weights of the model", changed == [])


def _seen_without_the_event(setup: Any) -> None:
    """See that an export differs on a GPU if its thread reads buffers before they are filled."""
    write, (name, how) = HostWriter._write, EXPORTS[-1]

    def early(self: HostWriter, buffer: Any) -> None:
        write(self, dataclasses.replace(buffer, copy_event=None))

    with snapshots.shared_folder() as folder, late(setup), mock.patch.object(HostWriter, "_write", early):
        changed = cases.exported(f"{folder}/weights", name, **how)
    setup.report.check("weights differ on a GPU without the wait", (changed != []) == setup.cuda)


def _in_memory(setup: Any, name: str, node: int) -> None:
    """Lose a node, and continue from the memory of the other one."""
    with snapshots.shared_folder() as folder, late(setup):
        retained, _, sent, changed, is_same, latest, again = memory_saves.lost_case(folder, name, node)
    if changed:
        setup.report.figure("what is not as it was", {key: float(value) for key, value in changed.items()})
    setup.report.check("all is restored", changed == {} and latest == "global_step1" and not again)
    setup.report.check("going on is what it was", is_same)
    alike = retained[0] == retained[1] and (sent > 0) == (name[2] == "G")
    setup.report.check("each node has all, and only what the other lacks is sent", alike)


def _resumed(setup: Any, row: tuple[str, dict[str, Any], str]) -> None:
    name, zero, optimizer = row
    job = snapshots.job_of("bf16", zero, optimizer, **saves.ASIDE, **WITHOUT_TIMER)

    def slowly() -> Any:
        stack = contextlib.ExitStack()
        stack.enter_context(late(setup))
        stack.enter_context(saves.late_copies())
        return stack

    with snapshots.shared_folder() as folder:
        results = cases.resumed(job, str(Path(folder, "saved")), name, slowly, contextlib.nullcontext)
    setup.report.check("loaded is what was saved", not results.loaded)
    setup.report.check("resumed is uninterrupted", not (results.resumed or results.elsewhere))
