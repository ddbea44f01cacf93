# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the planner predicts, with the compute and the links of a training that runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups

from deepspeed_ext.comm.process_groups import Topology, get_topology, ranks_per_node
from deepspeed_ext.config.keys import OUTER
from deepspeed_ext.config.normalize import STRATEGY_OF_STAGE
from deepspeed_ext.config.section import active_strategy
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.loco.settings import LocoSettings, UpdateSettings
from deepspeed_ext.planner.choice import Plan, plan
from deepspeed_ext.planner.compression import AS_IT_IS, Compression
from deepspeed_ext.planner.costs import PLAIN, Prediction
from deepspeed_ext.planner.described import (
    compression_of,
    describe_engine,
    dtype_of,
    measured_rates,
    same_everywhere,
)
from deepspeed_ext.planner.rates import HopRates, Rates
from deepspeed_ext.tools.plan.recorded import Cluster, Described
from deepspeed_ext.tools.report import flat
from deepspeed_ext.tools.report.recording import WITHIN

_FORMS = (AS_IT_IS, Compression(LocoSettings(), None), Compression(LocoSettings(), UpdateSettings()))
_SAME = 1e-6


def topology_of(engine: Engine) -> Topology:
    """Return the groups of all ranks: the strategy's of an engine, or those that one would have. Collective.

    Raises:
        ValueError: on all ranks; nodes have different numbers of ranks, or it is not known how many.
    """
    found: Topology | None = getattr(engine.optimizer, "topology", None)
    return get_topology(groups._get_sequence_data_parallel_group()) if found is None else found.whole


@dataclass(frozen=True)
class Predicted:
    """Predictions for a training that runs.

    Attributes:
        rates: of the links, as measured.
        now: of what runs; None if that is not predicted.
        all: of every strategy in every form, and the plain stages; the fastest first.
        described: what ``plan --from`` predicts from; None if it does not predict such trainings.
    """

    rates: Rates
    now: Prediction | None
    all: Sequence[Prediction]
    described: Described | None = None

    @property
    def kinds(self) -> tuple[HopRates, HopRates]:
        """Return the rates of both kinds of hops."""
        return self.rates.gather, self.rates.reduce

    def formula(self, hop: str) -> float | None:
        """Return the bytes that a rank receives by a hop in a step, of what runs.

        DeepSpeed's own collectives are over all ranks, so theirs are all between groups, if there are several.
        """
        if self.now is None:
            return None
        within, between = self.now.volume.intra, self.now.volume.inter
        if self.now.plain and between:
            within, between = 0.0, within + between
        return within if hop == WITHIN else between

    def choices(self) -> list[dict[str, Any]]:
        """Return what each would take, as ``report.json`` has it; only a device says how much memory it has."""
        device = get_accelerator()
        limit = None if device.is_synchronized_device() else device.total_memory()
        return [
            {
                "strategy": one.name,
                "step": one.total_seconds,
                "within": one.busy["within"],
                "between": one.busy["between"],
                "bytes_between": one.volume.inter,
                "gb": one.total_memory / 1e9,
                "fits": None if limit is None else one.total_memory <= limit,
                "now": one is self.now,
            }
            for one in self.all
        ]


def predict(engine: Engine, compute: float) -> Predicted:
    """Measure the links, and predict. Collective; takes some seconds.

    Args:
        engine: that trains.
        compute: seconds of a step's forward and backward, the same on all ranks.

    Raises:
        ValueError: on all ranks; see ``topology_of``.
    """
    config, topology = engine._config, topology_of(engine)
    model = same_everywhere(describe_engine(engine, engine.module))
    model = replace(model, compute=compute / model.accumulation)
    rates = measured_rates(config, topology, model)
    runs, sent = active_strategy(config), compression_of(config)
    made = plan(topology.sizes, model, rates, None, _forms(sent))
    every = sorted([*made.predictions, *made.plain], key=lambda one: (one.total_seconds, one.total_memory))
    now = _now(engine, made, runs.name if runs else None, sent)
    described = None
    if now is not None and not engine.pipeline_parallelism:
        sizes = topology.sizes
        together = ranks_per_node() if sizes.ranks == dist.get_world_size() else None  # else some hold other parts
        cluster = Cluster(sizes, together or sizes.group_size)
        flat_rates = flat.measure(config, dtype_of(model))
        described = Described(now.strategy, now.plain, sent, cluster, _backend(), model, rates, flat_rates)
    return Predicted(rates, now, _without_twins(every), described)


def _backend() -> str:
    """Return the backend whose latencies grow as those of the one in use."""
    return "gloo" if get_accelerator().is_synchronized_device() else "nccl"


def _forms(sent: Compression) -> list[Compression]:
    """Return the forms in which strategies are predicted: as what runs is sent, and the others by their defaults."""
    others = [one for one in _FORMS if _few_bits(one) != _few_bits(sent)]
    return [*others, sent]


def _few_bits(one: Compression) -> tuple[bool, bool]:
    return one.loco is not None, one.updates is not None


def _now(engine: Engine, made: Plan, name: str | None, sent: Compression) -> Prediction | None:
    """Return the prediction of what runs."""
    if getattr(engine._config.zero_config, OUTER, None) is not None:
        return None  # its steps are not alike
    if name is None:
        plain = STRATEGY_OF_STAGE.get(int(engine._config.zero_config.stage), "NNN")
        return next((one for one in made.plain if one.strategy == plain), None)
    wanted = (name, *_few_bits(sent))
    return next((one for one in made.predictions if (one.strategy, one.loco, one.updates) == wanted), None)


def _without_twins(every: Sequence[Prediction]) -> list[Prediction]:
    """Leave out strategies that are a plain stage's twin in all that is predicted, where a group is all ranks."""
    plain = {one.strategy: one for one in every if one.plain}
    return [
        one
        for one in every
        if one.plain
        or one.strategy not in PLAIN
        or one.loco
        or one.updates
        or abs(one.total_seconds - plain[one.strategy].total_seconds) > _SAME * one.total_seconds
    ]
