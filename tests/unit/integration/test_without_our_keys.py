# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Without our keys, DeepSpeed behaves bit for bit as if we were not installed, except for a list of differences. Each
case runs in the same rank processes as we are installed, and after our patches were undone."""

import contextlib
import copy
import gc
import hashlib
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.utils import groups
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch.nn import functional

import deepspeed_ext
from deepspeed_ext.config.implied import read_with_stage
from deepspeed_ext.integration import activation, fork, patcher, patches
from scripts import ROOT
from tests.harness import calls, mixtures, pipelines, snapshots, training
from tests.harness.logs import logged
from tests.harness.training import Job

REPLACED = [patch.target.removeprefix("deepspeed.") for patch in (*patches.REPLACED, *patches.OTHER_PACKAGES)]
ELSEWHERE = ("accelerate", "torch", "transformers")  # called in tests of their own
INSIDE = {name for name in REPLACED if not name.startswith(ELSEWHERE)}
OF_CHECKPOINTS = {name for name in INSIDE if re.search("checkpoint|ckpt|zero_to_fp32", name)}
SEVERAL = ("quantized gradients on two nodes", "pipeline with ZeRO-1")  # cases of groups of ranks
PAGE = ROOT / "deepspeed_ext" / "config" / "README.md"

pytestmark = pytest.mark.skipif(fork.version() is not None, reason="a fork has the fixes in its own files")


class Quantizer:
    """DeepSpeed's CUDA kernels of quantized gradients (qgZ) as far as its Python needs them: nothing is rounded."""

    Symmetric = 0

    def swizzle_quant(self, tensor: Any, groups: int, *_: int) -> tuple[Any, Any]:
        """The bits, viewed as float16; (nodes, ranks of a node, chunk) to ranks first."""
        *_, nodes, local = _
        values = tensor.view(-1).view(torch.float16).float()
        return values.view(nodes, local, -1).transpose(0, 1).reshape(-1), torch.ones(groups)

    def quantized_reduction(self, pieces: Any, scales: Any, *rest: int) -> tuple[Any, Any]:
        """The sum over the ranks of a node, not divided."""
        local = rest[-1]
        return pieces.view(local, -1).sum(0), scales[: len(scales) // local]

    def dequantize(self, values: Any, *_: Any) -> Any:
        return values


@contextlib.contextmanager
def on_nodes(local: int) -> Iterator[None]:
    """Take ``local`` ranks for those of a node, and the stand-in for the kernels."""
    accelerator = type(get_accelerator())
    with (
        mock.patch.object(accelerator, "device_count", lambda self: local),
        mock.patch.object(coalesced_collectives, "quantizer_module", Quantizer()),
    ):
        try:
            yield
        finally:
            groups._ALL_TO_ALL_GROUP.clear()


@pytest.mark.quick
def test_the_page_names_symbols_and_tests_of_each_difference() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("### Without a key")[2]
    table = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    acting = {name for row in rows for name in re.findall(r"`(\w[\w.]*)`", row[2])}
    assert acting <= {name.rpartition(":")[2] for name in REPLACED}
    assert f"The other {len(REPLACED) - len(acting)} replaced symbols" in section
    for *_, tests in rows:
        listed = re.findall(r"\]\(\.\./\.\./(tests/[\w/]+\.py)\) `(\w+)`", tests)
        assert listed and len(listed) == tests.count("]("), tests
        for path, name in listed:
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), (path, name)


@pytest.mark.quick
@pytest.mark.parametrize("section", [{"stage": 2}, {}, None])
def test_accelerate_reads_a_plain_section_as_it_is(section: Any) -> None:
    config = SimpleNamespace(config={"zero_optimization": section})
    read: list[Any] = []
    read_with_stage(lambda self: read.append(copy.deepcopy(self.config)), config)
    assert read == [{"zero_optimization": section}] == [config.config]


def cases() -> dict[str, Callable[[], Any]]:
    """Cases to run with and without the package; each returns values that must be equal."""
    plain = Job(steps=2, empty=False, zero=training.SMALL, accumulation=2, clipping=0.05)
    sums = {"data_types": {"grad_accum_dtype": "fp32"}}
    mixture = Job(network=mixtures.Mixtures, optimizer="Adam", empty=False, steps=2, zero={"reduce_bucket_size": 500})

    def quantized() -> Any:
        job = Job(sizes=(16, 24, 8), dtype="fp16", empty=False, steps=2, zero=training.SMALL)
        with on_nodes(2):
            return trained(job, {"stage": 3, "zero_quantized_gradients": True})

    def pipeline() -> Any:
        done = pipelines.train_pipeline(pipelines.Pipe(steps=2), {"stage": 1})
        return done.losses, done.norms, done.weights, done.kind

    return {
        "ZeRO-3": lambda: trained(plain, {"stage": 3}),
        "ZeRO-1 with BF16_Optimizer": lambda: trained(Job(steps=2, dtype="bf16", config=sums), {"stage": 1}),
        "ZeRO-2": lambda: trained(plain, {"stage": 2}),
        "ZeRO-3 by zero.Init": lambda: trained(Job(steps=2, empty=False, zero_init="config"), {"stage": 3}),
        "threshold": lambda: trained(mixture, {"stage": 3, "stage3_module_granularity_threshold": 60}),
        "leaf modules": lambda: trained(mixture, {"stage": 3, "leaf_module": {"classes": ["Layer"]}}),
        "quantized gradients on two nodes": quantized,
        "pipeline with ZeRO-1": pipeline,
        "an iterator that is not gathered": iterator_left,
    }


def trained(job: Any, zero: dict[str, Any]) -> Any:
    kinds: list[Any] = []

    def look(engine: Any) -> None:
        offload = getattr(engine.optimizer, "parameter_offload", None)
        coordinator = type(getattr(offload, "param_coordinator", None)).__name__
        kinds.extend([type(engine.optimizer).__name__, coordinator, sorted(vars(engine.optimizer))])

    record = training.train(job, zero, look)
    return kinds, record.losses, record.norms, record.scales, record.applied, record.weights


def iterator_left() -> int:
    """How many parameters an iterator still has after a GatheredParameters that is not enabled was given it."""
    parameters = torch.nn.Linear(2, 2).parameters()
    with deepspeed.zero.GatheredParameters(parameters, enabled=False):
        return len(list(parameters))


@contextlib.contextmanager
def without_us() -> Iterator[None]:
    activation.deactivate()
    try:
        yield
    finally:
        deepspeed_ext.activate()


def same(left: Any, other: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, other)
    if isinstance(left, dict):
        return left.keys() == other.keys() and all(same(left[key], other[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(other) and all(map(same, left, other))
    return bool(left == other)


@contextlib.contextmanager
def calls_seen(names: set[str]) -> Iterator[None]:
    """Note which replaced symbols are called, by their names in the list."""
    codes: dict[types.CodeType, dict[Any, str]] = {}  # what is replaced lazily has one code, and originals of its own
    for path, (applied,) in patcher._applied.items():
        function = getattr(applied.replacement, "__func__", applied.replacement)
        target = next(patch.target for patch in (*patches.REPLACED, *patches.OTHER_PACKAGES) if patch.path == path)
        codes.setdefault(function.__code__, {})[function.__wrapped__] = target.removeprefix("deepspeed.")

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in codes:
            replaced = codes[frame.f_code]
            names.add(replaced[frame.f_locals["original"]] if len(replaced) > 1 else next(iter(replaced.values())))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def observed(act: Callable[[], Any]) -> tuple[Any, list[str], list[str]]:
    """The result of a case, its collectives in order, and its log messages without their numbers."""
    reductions = ("all_reduce", "reduce", "reduce_scatter_tensor")
    names = (*reductions, "all_gather_into_tensor", "broadcast", "all_to_all_single", "barrier", "new_group")
    called: list[str] = []

    def spy(module: Any, name: str) -> Any:
        return calls.before(module, name, lambda *_, **__: called.append(name))

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(spy(torch.distributed, name))
        stack.enter_context(spy(deepspeed.comm, "all_gather_into_tensor"))  # which keeps torch's of before
        gc.collect()  # an engine of before says that it is gone
        gc.disable()
        stack.callback(gc.enable)
        lines = stack.enter_context(logged())
        result = act()
    return result, called, [re.sub(r"0x\w+|[\d.]+", "#", line) for _, line in lines]


def test_plain_runs_are_those_without_us_to_the_bit(ranks: Any) -> None:
    alone, several = ranks(2).run(plain_case, False), ranks(4).run(plain_case, True)
    for (few, called), (more, too) in zip(2 * alone, several, strict=True):
        found, seen = few | more, called | too
        for name, (result, collectives, lines, kind) in found.items():
            assert result and lines, (name, kind)
            compared = 2 * ["all_gather_into_tensor"] if name == "pipeline with ZeRO-1" else []
            assert collectives == compared, (name, collectives)
        assert found["threshold"][3][:2] == ["DeepSpeedZeroOptimizer_Stage3", "PartitionedParameterCoordinator"]
        assert found["ZeRO-1 with BF16_Optimizer"][3][0] == "BF16_Optimizer"
        others = INSIDE - OF_CHECKPOINTS
        assert others <= seen, others - seen


def plain_case(several: bool) -> tuple[dict[str, Any], set[str]]:
    """Of each case whether what it returns is the same, the collectives that are more with us, whether its lines are
    the same, and what it has trained; and which replaced symbols were called."""
    found, seen, linear = {}, set[str](), functional.linear
    for name, act in [case for case in cases().items() if (case[0] in SEVERAL) == several]:
        with without_us():
            act()  # DeepSpeed makes some things once, such as groups
            functional.linear = linear  # ZeRO-3 replaces it for good
            expected = observed(act)
        functional.linear = linear
        with calls_seen(seen):
            result = observed(act)
        kind = expected[0][0] if isinstance(expected[0], tuple) else None
        (ours, calls, lines), (theirs, fewer, others) = result, expected
        found[name] = same(ours, theirs), added(calls, fewer), same(lines, others), kind
    return found, seen


def added(calls: list[str], fewer: list[str]) -> list[str]:
    """Items of the first list that are not in the second; all items if the second is not a subsequence."""
    rest, more = [*fewer], []
    for call in calls:
        if rest and call == rest[0]:
            del rest[0]
        else:
            more.append(call)
    return calls if rest else more


def test_checkpoints_of_plain_stages_are_those_without_us(ranks: Any, tmp_path: Path) -> None:
    for files, loads, seen in ranks(2).run(checkpoint_case, str(tmp_path)):
        assert all(len(ours) > 7 and ours == theirs for ours, theirs in files), files
        for saved, loaded, ours, theirs in loads:
            if {saved, loaded} == {"IIG", "2"} or {saved, loaded} == {"NIG", "3"}:
                assert ours == {} and theirs.startswith("AssertionError"), (saved, loaded, ours, theirs)
            else:  # buffers and frozen parameters are not loaded, with us or without
                assert ours == theirs and {"seen buffer", "layers.1.weight model"} <= ours.keys(), (saved, loaded)
        assert seen >= OF_CHECKPOINTS, OF_CHECKPOINTS - seen


def checkpoint_case(folder: str) -> tuple[list[Any], list[Any], set[str]]:
    """The files of saves with us and without, with their digests or sizes; what is different after loads of universal
    checkpoints from what was saved, or the error, with us and without; and which replaced symbols were called."""
    seen: set[str] = set()
    job = snapshots.job_of("fp32")
    files = []
    for stage in "23":
        both = []
        for name, context in (("ours", calls_seen(seen)), ("theirs", without_us())):
            with context:
                engine, model = training.make_trained(job, stage)
                engine.save_checkpoint(f"{folder}/{stage}{name}", tag="tag")
                engine.load_checkpoint(f"{folder}/{stage}{name}") if stage == "2" else None
                engine.destroy()
                dist.barrier()
                weights = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{stage}{name}")
            paths = sorted(path for path in Path(folder, stage + name).rglob("*") if path.is_file())
            if stage == "3":  # what it pads with is whatever the memory holds
                both.append([(path.name, path.stat().st_size) for path in paths])
            else:
                both.append([(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths])
            both[-1] += [
                (key, hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest()) for key, weight in weights.items()
            ]
        files.append(both)
    wanted = {}
    for name in ("NIG", "IIG"):
        engine, model = training.make_engine(job, training.placed(name))
        snapshots.mark(engine, model)
        snapshots.run(engine, job, snapshots.steps_of(job, 2))
        wanted[name] = snapshots.snapshot(engine, model, job)
        engine.save_checkpoint(f"{folder}/{name}")
        snapshots.convert(f"{folder}/{name}")
        engine.destroy()
    universal = snapshots.job_of("fp32", checkpoint={"load_universal": True})
    loads = []
    for saved in wanted:
        for loaded in "23":
            differences: list[Any] = []
            for context in (calls_seen(seen), without_us()):
                with context:
                    engine, model = training.make_trained(universal, loaded)
                    error = snapshots.error_of(engine.load_checkpoint, f"{folder}/{saved}")
                    found = snapshots.difference(wanted[saved], snapshots.snapshot(engine, model, universal))
                    engine.destroy()
                differences.append(error or found)
            loads.append((saved, loaded, *differences))
    return files, loads, seen


def test_pipelines_with_zero_2_raise_without_us(ranks: Any) -> None:
    for message in ranks(4).run(pipeline_case):
        assert message.startswith("AssertionError: ZeRO-2 and ZeRO-3 are incompatible with pipeline"), message


def pipeline_case() -> str:
    with without_us():
        return snapshots.error_of(pipelines.make_pipeline, pipelines.Pipe(), {"stage": 2})
