# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The file in which ``"paro_strategy": "fastest"`` keeps its decisions: JSON, with an entry for each kind of run."""

import contextlib
import datetime
import json
import logging
import os
from pathlib import Path
from typing import Any

from deepspeed.utils import log_dist

from deepspeed_ext.config.keys import DECISION, FASTEST, SECTION, STRATEGY
from deepspeed_ext.version import __version__

_KEYS = ("strategy", "date", "version", "inputs", "plan")


def say(message: str) -> None:
    """Log at level WARNING, which DeepSpeed shows by default, since a strategy was chosen on the user's behalf."""
    log_dist(f"deepspeed_ext: {message}", ranks=[0], level=logging.WARNING)


class Decisions:
    """The decisions in a file, which one rank reads and writes. A damaged file is reported, but stops no run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self, inputs: dict[str, Any]) -> str | None:
        """Return the strategy that was chosen for the same inputs; None if there is none."""
        entries = self._read()
        for entry in entries:
            if entry["inputs"] == json.loads(json.dumps(inputs)) and entry["strategy"] in inputs["strategies"]:
                name = str(entry["strategy"])
                say(f'{SECTION}.{STRATEGY} "{FASTEST}" stays {name}, as decided on {entry["date"]} ({self.path})')
                return name
        if entries:
            say(f"{self.path} has no decision for this run: deciding anew")
        return None

    def keep(self, strategy: str, inputs: dict[str, Any], plan: dict[str, Any]) -> None:
        """Rewrite the file, with this entry first."""
        entry = {
            "strategy": strategy,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "version": __version__,
            "inputs": inputs,
            "plan": plan,
        }
        aside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"decisions": [entry, *self._read(quietly=True)]}, indent=2, allow_nan=False)
            aside.write_text(text + "\n")
            aside.replace(self.path)
        except (OSError, ValueError, TypeError) as error:
            say(f"the decision is not kept, {self.path} cannot be written ({error}). Set {SECTION}.{DECISION}")
            with contextlib.suppress(OSError):
                aside.unlink()

    def _read(self, quietly: bool = False) -> list[dict[str, Any]]:
        """Return all entries; none if there is no file, or it is not ours."""
        try:
            entries = json.loads(self.path.read_text())["decisions"]
            # Every entry must be complete; otherwise the file is not ours.
            return [{key: entry[key] for key in _KEYS} for entry in entries]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not quietly:
                say(f"{self.path} cannot be read ({type(error).__name__}: {error}): deciding anew")
            return []
