# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Extension points for tools, discovered through the entry-point group ``deepspeed_ext.plugins``.

An entry point names a module or an object. Either of its functions may be missing::

    def configure(config: dict[str, Any]) -> None: ...  # before DeepSpeed parses the configuration; may change it
    def engine_ready(engine: DeepSpeedEngine) -> None: ...  # the engine has its model and strategy

Both run on every rank, in the order of the entry points' names. An exception ends the construction of the engine.
"""

import functools
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed_ext.deepspeed_types import Engine

GROUP = "deepspeed_ext.plugins"


@functools.cache  # searching all installed packages takes milliseconds
def _plugins() -> list[tuple[str, Any]]:
    entries = set(entry_points(group=GROUP))  # a DeepSpeed fork that contains this package lists the same ones again
    return [(entry.name, entry.load()) for entry in sorted(entries, key=lambda entry: (entry.name, entry.value))]


def require(name: str, key: str) -> None:
    """Check that the plugin for a key is installed.

    Raises:
        ValueError: it is not installed.
    """
    names = [installed for installed, _ in _plugins()]
    if name not in names:
        raise ValueError(
            f"{key} needs the plugin {name!r}: expected an entry point of this name in the group {GROUP}, found "
            f"{names}. Install deepspeed_ext again (an editable installation as well), or remove the key."
        )


def configure(config: dict[str, Any]) -> None:
    """Call ``configure`` of each plugin with a configuration that DeepSpeed is about to parse."""
    _call("configure", config)


def engine_ready(engine: "Engine") -> None:
    """Call ``engine_ready`` of each plugin with an engine that has its model, but no optimizer yet."""
    _call("engine_ready", engine)


def _call(function: str, argument: Any) -> None:
    for _, plugin in _plugins():
        if hasattr(plugin, function):
            getattr(plugin, function)(argument)
