# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Plugins: found by their entry points, and called with configurations and engines."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from deepspeed_ext.config.settings import REPORT_VARIABLE as VARIABLE
from deepspeed_ext.integration import plugins
from deepspeed_ext.integration.seams import check_our_keys


def planted_case() -> tuple[int, Any, list[str]]:
    """Return the calls of a planted plugin for one engine, and the attributes that ours set on another."""
    from tests.harness.training import Job, make_engine

    plugin = mock.Mock()
    plugin.configure = lambda config: config["zero_optimization"].update(stage=2)
    with mock.patch.object(plugins, "_plugins", lambda: [("planted", plugin), ("empty", object())]):
        made, _ = make_engine(Job(), {"stage": 1})
    engine, _ = make_engine(Job(), {"stage": 2})
    touched = [name for name in ("step", "backward", "train_batch") if name in vars(engine)]
    return made.zero_optimization_stage(), plugin.engine_ready.call_args.args == (made,), touched


def test_a_plugin_gets_the_configuration_and_the_engine(ranks: Any) -> None:
    assert ranks(1).run(planted_case) == [(2, True, [])]


@pytest.mark.quick
def test_an_entry_point_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even without an installation, once where two packages have the same one, and others of the same name as well."""
    (tmp_path / "planted.py").write_text("def configure(config): config['calls'] += 1")
    (tmp_path / "namesake.py").write_text("def configure(config): config['namesake'] = True")
    for name, module in (("one", "planted"), ("other", "planted"), ("third", "namesake")):
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nplanted = {module}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "_plugins", functools.cache(plugins._plugins.__wrapped__))
    plugins.configure(config := {"calls": 0})
    assert config.pop("namesake") and config == {"calls": 1}
    plugins.require("planted", "a key")
    with pytest.raises(ValueError, match="a key needs the plugin 'other': expected an entry point"):
        plugins.require("other", "a key")
    monkeypatch.setattr(plugins, "_plugins", list)
    monkeypatch.setenv(VARIABLE, "{}")
    make_config = check_our_keys(lambda self, *_: setattr(self, "_param_dict", {}))
    with pytest.raises(ValueError, match=f"{VARIABLE} needs the plugin 'report': expected an entry point"):
        make_config(SimpleNamespace(), {})
