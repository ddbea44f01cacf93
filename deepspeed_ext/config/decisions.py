# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The file of decisions, with which a resumed run repeats those of earlier runs."""

import contextlib
import datetime
import json
import os
from pathlib import Path
from typing import Any

from deepspeed_ext.config.keys import DECISION, SECTION
from deepspeed_ext.console import warn_on_rank_0
from deepspeed_ext.version import __version__

_KEYS = ("strategy", "date", "version", "inputs", "plan")


class Decisions:
    """The decisions in a file, which one rank reads and writes. A damaged file is only logged."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self, inputs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the decision for the same inputs; None without one."""
        entries = self._read()
        for entry in entries:
            # A strategy that the configuration refuses is ignored: the file may have been edited.
            # Compare after a round trip through JSON, which turns tuples into lists.
            if entry["inputs"] == json.loads(json.dumps(inputs)) and entry["strategy"] in inputs["strategies"]:
                return entry
        if entries:
            warn_on_rank_0(f"{self.path} has no decision for this run: choosing again")
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
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Decisions for other inputs, such as another number of ranks, are retained.
            text = json.dumps({"decisions": [entry, *self._read(quietly=True)]}, indent=2, allow_nan=False)
            temporary.write_text(text + "\n")
            temporary.replace(self.path)  # atomic, so that other runs never read a partial file
        except (OSError, ValueError, TypeError) as error:
            warn_on_rank_0(f"the decision could not be written to {self.path} ({error}). Set {SECTION}.{DECISION}")
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _read(self, quietly: bool = False) -> list[dict[str, Any]]:
        """Return all entries; none if the file is missing, damaged, or not ours."""
        try:
            entries = json.loads(self.path.read_text())["decisions"]
            # An incomplete entry raises KeyError: the file is not ours.
            return [{key: entry[key] for key in _KEYS} for entry in entries]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not quietly:
                warn_on_rank_0(f"{self.path} cannot be read ({type(error).__name__}: {error}): choosing again")
            return []
