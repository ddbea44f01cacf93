# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The choice of leaf modules as a table: a row per class, the hooks saved, and the parameters live at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from deepspeed_ext.leaf.modules import HOOKS, LeafKind, ModuleChoice, Settings, numel_of

_FETCHED = {
    LeafKind.UNIT.value: "as one",
    LeafKind.CHUNKED.value: "in {}",
    LeafKind.WINDOWED.value: "in {}",
    LeafKind.FINE.value: "one by one: {}",
}


class ClassSummary(NamedTuple):
    """The modules of one class that are fetched alike, for the same reason."""

    cls: str
    modules: int
    numel: int  # of the largest
    granularity: int | None  # of the largest
    bytes: int  # of the largest, as a unit
    kind: str
    why: str


@dataclass(frozen=True)
class LiveLimits:
    """ZeRO-3's settings that bound what is gathered at a time, all in elements."""

    most: int  # stage3_max_live_parameters
    prefetch: int  # stage3_prefetch_bucket_size
    reuse: int  # stage3_max_reuse_distance
    persistence: int  # stage3_param_persistence_threshold


def summaries(found: Sequence[ModuleChoice]) -> list[ClassSummary]:
    """Return one summary for each class, kind and reason, in the order of the model, without modules inside units."""
    alike: dict[tuple[str, str, str], list[ModuleChoice]] = {}
    for one in found:
        if one.kind != LeafKind.INSIDE:
            why = "" if one.kind == LeafKind.UNIT else one.why
            if one.chunks:
                why = f"{len(one.chunks)} windows of experts; {one.why}"
            if one.windows:
                why = f"{len(one.windows)} windows of at most {len(one.windows[0])} experts; {one.why}"
            alike.setdefault((type(one.module).__name__, one.kind.value, _general(why)), []).append(one)
    table = []
    for (cls, kind, why), some in alike.items():
        most = max(some, key=lambda one: one.numel)
        table.append(ClassSummary(cls, len(some), most.numel, most.granularity, most.bytes, kind, why))
    return table


def _general(why: str) -> str:
    """Return a reason without what differs between modules of one class."""
    return why if " " not in why or why.split(" ", 1)[0].count(".") == 0 else f"a module in it {why.split(' ', 1)[1]}"


def hooks(found: Sequence[ModuleChoice], model: nn.Module) -> tuple[int, int]:
    """Return the number of hooks on modules before and after the choice.

    DeepSpeed has four on each module that is not inside a leaf module.
    """
    modules = sum(1 for _ in model.modules())
    coarse = [one.module for one in found if one.kind in (LeafKind.UNIT, LeafKind.WINDOWED)]
    coarse += [expert for one in found for chunk in one.chunks for expert in chunk]
    inside = sum(sum(1 for _ in module.modules()) - 1 for module in coarse)
    return HOOKS * modules, HOOKS * (modules - inside)


def predicted_live(found: Sequence[ModuleChoice], model: nn.Module, live: LiveLimits) -> int:
    """Return an upper bound of the elements that are gathered at a time.

    They are parameters that persist, those in use, those prefetched (whole units that begin within the prefetch
    bucket), and those kept because they are used again within the reuse distance (whole units, too).
    """
    total = sum(numel_of(p) for p in model.parameters())
    packed = {id(p) for one in found if one.windows for p in one.module.parameters()}  # they do not persist
    small = sum(numel_of(p) for p in model.parameters() if numel_of(p) <= live.persistence and id(p) not in packed)
    fetched = [one.numel for one in found if one.kind == LeafKind.UNIT]
    for one in found:
        if one.kind == LeafKind.FINE:
            fetched.append(sum(map(numel_of, one.module.parameters(recurse=False))))
        elif one.kind == LeafKind.CHUNKED:  # a window stays while parameters beside the experts come and go
            chunks = [sum(numel_of(p) for expert in chunk for p in expert.parameters()) for chunk in one.chunks]
            fetched.append(max(chunks) + one.numel - sum(chunks))
        elif one.kind == LeafKind.WINDOWED:  # the window in use, and the next one
            window = one.numel // sum(map(len, one.windows)) * len(one.windows[0])
            fetched.append(min(one.numel, 2 * window))
    largest = max(fetched, default=0)
    ahead = min(live.prefetch, live.most) + largest if live.prefetch else 0
    kept = live.reuse + largest if live.reuse else 0
    return min(total, small + largest + ahead + kept)


def text(found: Sequence[ModuleChoice], model: nn.Module, settings: Settings, live: LiveLimits) -> str:
    """Return the report as text."""
    how = (
        f"granularity up to {settings.threshold:,}, at most {settings.most_live:,} parameters"
        if settings.budget is None
        else f"at most {settings.budget:,} bytes in a unit"
    )
    lines = [
        f"leaf modules of {type(model).__name__}: {how}",
        f"  {'class':<32} {'count':>6} {'parameters':>15} {'granularity':>13} {'bytes as unit':>17}  fetched",
    ]
    for one in summaries(found):
        granularity = "" if one.granularity is None else f"{one.granularity:,}"
        fetched = _FETCHED[one.kind].format(one.why)
        lines.append(
            f"  {one.cls:<32.32} {one.modules:>6} {one.numel:>15,} {granularity:>13} {one.bytes:>17,}  {fetched}"
        )
    before, after = hooks(found, model)
    fewer = f" ({1 - after / before:.1%} fewer)" if before else ""
    lines.append(f"  hooks on modules: {before:,} before, {after:,} after{fewer}")
    lines.append(f"  parameters gathered at a time: at most {predicted_live(found, model, live):,} predicted")
    return "\n".join(lines)
