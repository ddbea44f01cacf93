# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How fast the hops inside groups and between them are, by size of message, over the groups of training."""

from deepspeed_ext.planner.rates import fit
from deepspeed_ext.tools.doctor.check import Answers, Check
from deepspeed_ext.tools.doctor.findings import Finding, Level, bytes_text, rate_text
from deepspeed_ext.tools.doctor.place import Place
from deepspeed_ext.tools.doctor.printer import bar

_LEVELS = ("intra", "inter")
_SUBJECTS = {"intra": "inside groups", "inter": "between groups"}
_ALIKE = 1.5  # of rates, below which strategies have little to gain
_MOST_SECONDS = 240.0


def examine(place: Place) -> dict[str, list[tuple[float, float]]] | None:
    """Return (bytes, seconds) of gathers of each level; all ranks have the same, so only the first one tells them."""
    import torch

    from deepspeed_ext.comm.hops import GatherHop
    from deepspeed_ext.comm.process_groups import get_topology
    from deepspeed_ext.planner import probe

    topology = get_topology(None, place.options.group_size)
    hops = {level: GatherHop(getattr(topology, level), level) for level in _LEVELS}
    found = {level: probe.samples(hop, torch.float32) for level, hop in hops.items()}
    return None if place.rank else found


def judge(answers: Answers, place: Place) -> list[Finding]:
    """Return a plot for each level, and whether there is a slow one."""
    samples = {level: answers[0][level] for level in _LEVELS if answers[0][level]}
    if not samples:
        return [Finding("hops", Level.OK, "one rank: nothing is sent")]
    found = [_plotted(level, some) for level, some in samples.items()]
    if len(samples) == 2:
        inside, across = (fit(samples[level]).bandwidth for level in _LEVELS)
        ratio = inside / across
        said = f"between groups a rank receives {ratio:.3g} times more slowly than inside"
        if ratio < _ALIKE:
            said += ": strategies gain little where links are alike"
        found.append(Finding("compared", Level.OK, said))
    return found


def _plotted(level: str, samples: list[tuple[float, float]]) -> Finding:
    rate, rates = fit(samples), [nbytes / seconds for nbytes, seconds in samples]
    lines = tuple(
        f"{bytes_text(nbytes):>8} {bar(one, max(rates))} {rate_text(one)}"
        for (nbytes, _), one in zip(samples, rates, strict=True)
    )
    smallest, seconds = samples[0]
    said = (
        f"{rate_text(rate.bandwidth)} that each rank receives, all at once; {bytes_text(smallest)} take "
        f"{seconds * 1e3:.3g} ms"
    )
    return Finding(_SUBJECTS[level], Level.OK, said, details=lines)


CHECK = Check("links", examine, judge, together=True, least_seconds=_MOST_SECONDS)
