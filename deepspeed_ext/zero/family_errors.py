# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the hops of several families of parameters keep, as one."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from deepspeed_ext.comm.hops import ErrorState, Span


class FamilyErrorStates(ErrorState):
    """What each family's hop between groups keeps.

    Args:
        kept: by the name of the family.
        family_of: gives the name of the family of a flat buffer, by its number.
    """

    def __init__(self, kept: Mapping[str, ErrorState], family_of: Callable[[int], str]) -> None:
        self._kept = dict(kept)
        self._family_of = family_of
        self.keeps_errors = any(one.keeps_errors for one in kept.values())

    @property
    def halves(self) -> set[str]:
        """See ``ErrorState``."""
        return {half for one in self._kept.values() for half in one.halves}

    def finish_step(self, applied: bool) -> None:
        """See ``ErrorState``."""
        for one in self._kept.values():
            one.finish_step(applied)

    def states(self) -> dict[str, Any]:
        """See ``ErrorState``; by the name of the family."""
        saved = {name: one.states() for name, one in self._kept.items()}
        steps = max((states.get("steps", 0) for states in saved.values()), default=0)
        return {"families": saved, "steps": steps}

    def load_states(self, states: Mapping[str, Any]) -> None:
        """See ``ErrorState``."""
        for name, one in self._kept.items():
            one.load_states(states.get("families", {}).get(name, {}))

    def errors_in(self, states: Mapping[str, Any]) -> Iterable[tuple[Span, Tensor]]:
        """See ``ErrorState``."""
        for name, one in self._kept.items():
            yield from one.errors_in(states.get("families", {}).get(name, {}))

    def load_errors(self, errors: Mapping[Span, Tensor], steps: int) -> None:
        """See ``ErrorState``."""
        for name, one in self._kept.items():
            one.load_errors(
                {span: kept for span, kept in errors.items() if self._family_of(span.buffer) == name}, steps
            )

    def forget(self) -> None:
        """See ``ErrorState``."""
        for one in self._kept.values():
            one.forget()

    def offload(self) -> None:
        """See ``ErrorState``."""
        for one in self._kept.values():
            one.offload()
