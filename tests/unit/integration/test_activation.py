# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Activation in every import order; engines with our keys and without in one process."""

import os
import re
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest

from tests.harness.fork_runner import run_in_forks
from tests.harness.tiers import deep

CHECK = """
from deepspeed_ext.integration import patcher
import deepspeed.runtime.engine, deepspeed.runtime.config
from deepspeed import DeepSpeedEngine
assert all(state in ("applied", "hooked", "as expected") for _, state in patcher.status()), patcher.status()
assert DeepSpeedEngine._configure_zero_optimizer.__deepspeed_ext__
"""

ORDERS = {
    "a submodule first": "from deepspeed.runtime.zero.config import DeepSpeedZeroConfig",
    "torch first": "import torch; import deepspeed",
    "ours last": "import deepspeed; import deepspeed_ext",
}


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


SOURCE = """
import inspect, runpy, sys, deepspeed.runtime.config as c, deepspeed.runtime.engine as e
c.DeepSpeedConfig({'train_batch_size': 1})
print(len(inspect.getsource(e.DeepSpeedEngine)))
ours = ('deepspeed_ext.config.section', 'deepspeed_ext.config.check', 'deepspeed_ext.zero', 'deepspeed_ext.comm')
print(*[n for n in sys.modules if n.startswith(ours)], 'end')
"""
REPORT = "sys.argv[1:] = '--ranks 6 --group-size 2'.split(); runpy.run_module('deepspeed_ext', run_name='__main__')"


@pytest.fixture(scope="module")
def imported() -> subprocess.CompletedProcess[str]:
    """Of a process that imports a submodule of DeepSpeed first, and ends with our report."""
    return run(ORDERS["a submodule first"] + SOURCE + CHECK + REPORT)


@pytest.mark.parametrize("order", ["a submodule first", *deep("torch first", "ours last")])
def test_every_import_order(imported: subprocess.CompletedProcess[str], order: str) -> None:
    done = imported if order == "a submodule first" else run(ORDERS[order] + CHECK)
    assert done.returncode == 0, done.stderr


def test_late_activation_where_the_entry_point_is_off() -> None:
    done = run(
        "import deepspeed, sys; assert 'deepspeed_ext' not in sys.modules; import deepspeed_ext" + CHECK,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.quick
def test_words_of_the_off_switch() -> None:
    code = (
        "import os, sys; from deepspeed_ext.integration import activation as a\n"
        "for word in ('1', 'true', 'YES', ' On ', '', '0', 'False', 'no', 'off', 'never', 'never'):\n"
        "    a.deactivate(); os.environ['DEEPSPEED_EXT_DISABLE'] = word; a.activate()\n"
        "    print(a._hook in sys.meta_path)"
    )
    done = run(code)
    assert done.stdout.split() == ["False"] * 4 + ["True"] * 7
    assert done.stderr == (
        "DEEPSPEED_EXT_DISABLE must be one of 1, true, yes, on, or of 0, false, no, off, got 'never': "
        "deepspeed_ext stays active\n"
    )


def test_a_finder_that_raises_breaks_only_deepspeeds_import() -> None:
    code = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'deepspeed': raise RuntimeError('not here')\n"
        "sys.meta_path[:0] = [Finder()]\n"
        "import torch; print(sys.modules['deepspeed_ext'].integration.activation._hook in sys.meta_path)\n"
        "try:\n    import deepspeed\n"
        "except RuntimeError as found: print(found)\n"
        "del sys.meta_path[1]\n"
        "from deepspeed.runtime import config as c; print(hasattr(c.get_zero_config, '__wrapped__'))"
    )
    done = run(code)
    assert done.stdout.splitlines()[:2] == ["True", "not here"], done.stderr
    assert done.stdout.split()[-1] == "True", done.stderr


def test_importing_torch_imports_little_and_survives_our_faults() -> None:
    pieces = {
        "modules": "import torch, sys\n"
        "print('deepspeed' in sys.modules, hasattr(torch.distributed.destroy_process_group, '__wrapped__'))\n"
        "print(*sorted(name for name in sys.modules if name.startswith('deepspeed_ext') or name == 'packaging'))",
        "fault": "import deepspeed_ext.integration.patcher as p; p.apply = lambda name: 1 / 0\n"
        "import deepspeed; print('alive')",
    }
    out = run_in_forks("import torch", pieces)
    needed = ("", ".integration", ".integration.activation", ".version")
    assert out["modules"].splitlines() == ["False False", " ".join(f"deepspeed_ext{name}" for name in needed)]
    assert out["fault"].split()[-1] == "alive"


def test_without_our_keys_little_of_ours_is_imported(imported: subprocess.CompletedProcess[str]) -> None:
    """Nothing that depends on DeepSpeed; and the source of hooked modules stays readable."""
    length, out_modules = re.findall(r"^(\d+)\n(.*)", imported.stdout, re.MULTILINE)[0]
    assert int(length) > 10_000 and out_modules == "end", (imported.stdout, imported.stderr)


def test_several_engines_in_one_process(ranks: Any) -> None:
    kinds = ["Stage12Optimizer", "DeepSpeedZeroOptimizer", "Stage3Optimizer", "DeepSpeedZeroOptimizer_Stage3"]
    for rows in ranks(2).run(several_engines_case):
        assert rows == [(kind, True) for kind in kinds]


def several_engines_case() -> list[tuple[str, bool]]:
    """Return the optimizers of engines that take steps in turn, and whether each trains as it does alone."""
    import torch

    from tests.harness import training

    job = training.Job(empty=False, accumulation=2, zero=training.SMALL)
    zeros = [training.placed("NIG"), {"stage": 2}, training.placed("IIG"), {"stage": 3}]
    training.train(job, {"stage": 3})  # it replaces torch's linear for good, by one that rounds otherwise
    alone = [training.train(job, zero).weights for zero in zeros]
    engines = [(*training.make_engine(job, zero), training.batches(job)) for zero in zeros]
    for number in range(job.steps * job.accumulation):
        for engine, _, data in engines:
            training.step(engine, job, number, data)
    rows = []
    for weights, (engine, model, _) in zip(alone, engines, strict=True):
        rows.append((type(engine.optimizer).__name__, torch.equal(weights, training.whole_weights(model))))
        engine.destroy()
    return rows


@pytest.mark.quick
def test_report_command(imported: subprocess.CompletedProcess[str]) -> None:
    assert f"deepspeed     {metadata.version('deepspeed')}\n" in imported.stdout
    assert "symbols of DeepSpeed (supported >=0.19.8,<0.20, tested 0.19.8)" in imported.stdout
    assert re.search("(applied|hooked) +deepspeed.runtime.config.get_zero_config", imported.stdout)
    assert "not imported" not in imported.stdout and "ours override\n  all as expected\n" in imported.stdout
    assert "groups of 6 data-parallel rank(s): 3 x 2" in imported.stdout
    assert "[[0, 2, 4], [1, 3, 5]]" in imported.stdout
