# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Patches: declared, applied once, undone; a DeepSpeed that we do not know is refused only if our keys are used."""

import pkgutil

import pytest

from deepspeed_ext.integration import fork, patches, symbols
from tests.harness.fork_runner import run_in_forks

pytestmark = pytest.mark.skipif(fork.version() is not None, reason="a fork has hooks, and nothing is patched")

PRELUDE = """
import sys
import deepspeed_ext
from deepspeed_ext.integration import activation, patcher, patches, symbols
import deepspeed
from deepspeed.runtime import config as ds_config, engine as ds_engine
from deepspeed.runtime.zero import stage_1_and_2
def section(**zero):
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
"""
# What each piece of code would import for itself, and a name that a script has imported before DeepSpeed.
FIRST = f"from torch.distributed import destroy_process_group{PRELUDE}import torch._dynamo\n"


def test_each_patch_has_a_reason_and_a_signature() -> None:
    assert len({patch.target for patch in patches.PATCHES}) == len(patches.PATCHES)
    assert all(patch.purpose and patch.signature.startswith("(") for patch in patches.PATCHES)


def test_each_symbol_is_replaced_by_what_is_there() -> None:
    """Functions that are imported lazily are named by a string."""
    for patch in (*patches.REPLACED, *patches.OTHER_PACKAGES):
        assert patch.replace is not None
        assert callable(pkgutil.resolve_name(f"{patch.replace.__module__}:{patch.replace.__name__}")), patch.target


def test_signatures_are_compared_without_annotations() -> None:
    def one(a: "int | str", *, b: int = 3) -> None: ...

    def two(a, *, b=3): ...  # type: ignore[no-untyped-def]

    assert symbols.signature_of(one) == symbols.signature_of(two) == "(a, *, b=3)"


STATES = "print(*(f'{state}|{p.path}' for p, state in patcher.status()), sep=chr(10)); patcher.require()"
ONCE = """
def now():  # functions, out of static methods too
    return [getattr(found, "__func__", found) for *_, found in (p.locate() for p in patches.PATCHES if p.replace)]
def static():
    return [type(p.locate()[2]) is staticmethod for p in patches.PATCHES if p.replace]
def copied():  # whether other modules that have imported a symbol have the same
    import torch.distributed as dist
    from deepspeed.runtime.zero import linear, partition_parameters
    pairs = (dist.distributed_c10d, dist, "destroy_process_group"), (linear, partition_parameters, "zero3_linear_wrap")
    return all(getattr(one, name) is getattr(other, name) for one, other, name in pairs)
once, kinds = now(), static()
deepspeed_ext.activate(); deepspeed_ext.activate()
assert now() == once and copied()
assert all(f.__deepspeed_ext__ and not hasattr(f.__wrapped__, "__deepspeed_ext__") for f in once)
originals = [f.__wrapped__ for f in once]
activation.deactivate()
assert now() == originals and static() == kinds and any(kinds) and copied()
assert activation._hook not in sys.meta_path
deepspeed_ext.activate()
assert all(f.__deepspeed_ext__ for f in now()) and static() == kinds and copied()
"""
# DeepSpeed's nvtx decorator takes (*args, **kwargs), and does not say what it wraps.
DECORATED = """
from deepspeed.utils.nvtx import instrument_w_nvtx
@instrument_w_nvtx
def ranged(self, tensor, more=None): ...
@instrument_w_nvtx
@instrument_w_nvtx
def twice(self, tensor, more=None): ...
for one in (ranged, twice):
    assert symbols.signature_of(one) == "(self, tensor, more=None)", symbols.signature_of(one)
"""
# Engines without a key of ours import classes of ours, too: any ZeRO-3 engine that of our coordinator.
PARENT = """
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Theirs
Theirs.trace_prologue = lambda self, sub_module, more: None
Theirs.wait_for_current = lambda self: None
from deepspeed_ext.zero.sharded import coordinator
import deepspeed_ext.pipeline.setup
ds_config.get_zero_config(section(stage=3))
ds_config.get_zero_config(section(paro_strategy="NIG"))
"""
ON_TOP = """
ours = ds_config.get_zero_config
theirs = ds_config.get_zero_config = lambda param_dict: ours(param_dict)
activation.deactivate()
assert ds_config.get_zero_config is theirs
"""

RELOADED = """
import importlib, os
from __main__ import destroy_process_group
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import torch
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
assert destroy_process_group is torch.distributed.destroy_process_group and destroy_process_group.__deepspeed_ext__
def unexpected():
    return [patch.path for patch, state in patcher.status() if state not in ("applied", "as expected", "not imported")]
def make(times=1):
    model = torch.nn.Linear(4, 4)
    config = {**section(paro_strategy="NIG"), "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    return deepspeed.initialize(model=model, model_parameters=[*model.parameters()] * times, config=config)[0]
for module in (ds_config, ds_engine, deepspeed):
    importlib.reload(module)
assert deepspeed.DeepSpeedEngine is ds_engine.DeepSpeedEngine and unexpected() == [], unexpected()

configure = ds_engine.DeepSpeedEngine._configure_zero_optimizer
ds_engine.DeepSpeedEngine._configure_zero_optimizer = configure.__wrapped__
assert unexpected() == ["deepspeed.runtime.engine.DeepSpeedEngine._configure_zero_optimizer"]
engine = make()
assert type(engine.optimizer).__name__ == "Stage12Optimizer" and unexpected() == []
engine.destroy()

check = ds_engine.DeepSpeedEngine._check_for_duplicates
ds_engine.DeepSpeedEngine._check_for_duplicates = lambda self, optimizer: 1 / 0  # it compares all pairs
make().destroy()
ds_engine.DeepSpeedEngine._check_for_duplicates = check
try:
    make(times=2)
except AssertionError as error:
    assert "occurs multiple times in optimizer.param_groups" in str(error), error
else:
    raise SystemExit("accepted")

configure = ds_engine.DeepSpeedEngine._configure_zero_optimizer
ds_engine.DeepSpeedEngine._configure_zero_optimizer = lambda self, optimizer: configure.__wrapped__(self, optimizer)
try:
    make()
except RuntimeError as error:
    assert "paro_strategy N-I-G has no effect" in str(error), error
    assert "other code has replaced or overridden" in str(error), error
else:
    raise AssertionError("accepted")
torch.distributed.destroy_process_group()
print("refused")
"""


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    pieces = {"states": STATES, "once": ONCE, "decorated": DECORATED, "parent": PARENT, "on top": ON_TOP}
    pieces["reloaded"] = RELOADED
    return run_in_forks(FIRST, {name: PRELUDE + code for name, code in pieces.items()})


@pytest.mark.quick
def test_patches_are_applied_once_and_undone(outputs: dict[str, str]) -> None:
    """Signatures are read through decorators, and undoing keeps replacements that other code has put on top."""
    states, parent = outputs["states"].splitlines(), outputs["parent"]
    assert states and all(line.startswith(("applied|", "as expected|")) for line in states)
    assert outputs["once"] == outputs["decorated"] == outputs["on top"] == ""
    assert parent.startswith("raised RuntimeError")
    for said in (
        "trace_prologue has signature (self, sub_module, more)",
        "wait_for_current is new in DeepSpeed",
        "Tested: DeepSpeed",
    ):
        assert said in parent


def test_an_engine_has_our_optimizer_after_a_reload_or_raises(outputs: dict[str, str]) -> None:
    """Functions that a script has imported by their names before DeepSpeed are replaced as well."""
    assert outputs["reloaded"].endswith("refused\n"), outputs["reloaded"]


MISSING = "import torch, deepspeed.runtime.zero.stage_1_and_2 as z\ndel z.all_gather_dp_groups\n"
CHANGED = "import torch, deepspeed.runtime.zero.stage_1_and_2 as z\nz.all_gather_dp_groups = lambda groups: None\n"
PRIVATE = (
    "import torch, deepspeed.runtime.zero.stage3 as z\n"
    "del z.DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads\n"
)
OVERRIDE = "import torch, deepspeed.runtime.zero.stage_1_and_2 as z\ndel z.DeepSpeedZeroOptimizer.reduce_ipg_grads\n"
GATE = "import torch, deepspeed.runtime.config as c\nc.get_zero_config = lambda param_dict, more: None\n"
GATE_GONE = "import torch, deepspeed.runtime.config as c, deepspeed.runtime.zero.config as z\ndel c.get_zero_config\n"
# Of a DeepSpeed that is too new nothing but the gates is patched.
VERSION = "import deepspeed\ndeepspeed.__version__ = '0.20.1'\n"
BROKEN = {
    "missing": (MISSING, "deepspeed.runtime.zero.stage_1_and_2.all_gather_dp_groups no longer exists"),
    "changed": (CHANGED, "all_gather_dp_groups has signature (groups), expected (groups_flat, "),
    "override": (OVERRIDE, "stage_1_and_2.DeepSpeedZeroOptimizer.reduce_ipg_grads no longer exists"),
    "private": (PRIVATE, "DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads no longer"),
    "gate": (GATE, "deepspeed.runtime.config.get_zero_config has signature (param_dict, more), expected (param_dict)"),
    "gate gone": (GATE_GONE, "deepspeed.runtime.config.get_zero_config no longer exists"),
    "version": (VERSION, "its version is 0.20.1, supported is >=0.19.8,<0.20"),
}

# Stock DeepSpeed, imported before the package is active.
STOCK = """
os.environ["DEEPSPEED_EXT_DISABLE"] = "1"
import torch._dynamo, deepspeed, deepspeed.runtime.pipe.engine
del os.environ["DEEPSPEED_EXT_DISABLE"]
"""
ACTIVATE = "import deepspeed_ext\ndeepspeed_ext.activate()\n" + PRELUDE
USE = "ds_config.DeepSpeedConfig(section(paro_strategy='NIG'))\n"
PATCHED = "print([p.gate for p, state in patcher.status() if state == 'applied'])\n"
REPORT = "from deepspeed_ext.__main__ import print_patches\nprint_patches()\n"
DO_NOT = "print(int(ds_config.DeepSpeedConfig(section(stage=2)).zero_config.stage))\n"


@pytest.mark.quick
def test_an_unknown_deepspeed_is_refused_when_our_keys_are_used() -> None:
    pieces = {fault: breakage + ACTIVATE for fault, (breakage, _) in BROKEN.items()}
    for fault in pieces:
        pieces[fault] += "" if fault.startswith("gate") else DO_NOT
        pieces[fault] += (PATCHED + REPORT if fault == "version" else "") + USE
    out = run_in_forks(STOCK, pieces)
    for fault, (_, message) in BROKEN.items():
        unused, _, refused = out[fault].partition("raised RuntimeError")
        for part in (message, "Tested: DeepSpeed 0.19.8", "or remove the keys of deepspeed_ext (paro_*"):
            assert part in refused, fault
        assert unused.startswith("" if fault.startswith("gate") else "2\n"), fault
    assert out["version"].startswith("2\n[True, True, True]\n")
    assert f"not known, and our keys are refused: {BROKEN['version'][1]}" in out["version"]
