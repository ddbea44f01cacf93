# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What parameters in host memory cost: bytes there and on the device, and copies between the two. Pure.

Note [Cost of parameters in host memory]
    Of parameters of Ψ bytes, frozen ones included, a rank holds Ψ/m (p = I) or Ψ/n (p = G) on the host, and copies
    that to the device each time they are gathered, but for what ``paro_parameter_cache_bytes`` keeps there.

    After a step, a slice of several rows (p = I, os = G, more than one group) is completed window by window. What has
    crossed, Ψ_t/m of the trained parameters, is copied to the host under the next forward, and the first use waits for
    it. Two windows are on the device. Updates in few bits also need what is held, Ψ_t/m the other way, and so does
    what an offloaded optimizer has updated, Ψ_t/n. Where p = os, DeepSpeed copies Ψ_t/n or Ψ_t/m to the host in the
    step, before anything else begins, unless an offloaded optimizer has it there.

    Both directions run at once, beside compute. From pageable memory the host waits for each copy, and queues no
    compute meanwhile. Copies of an offloaded optimizer's gradients are not counted.
"""

from dataclasses import dataclass

from deepspeed_ext.strategy import GroupSizes, ModelStates, Placement, Strategy


@dataclass(frozen=True)
class HostParameters:
    """How parameters are in host memory: ``offload_param``.

    Attributes:
        pinned: whether that memory is pinned.
        cache: bytes of slices that each device has as well (``paro_parameter_cache_bytes``).
    """

    pinned: bool = True
    cache: float = 0.0


@dataclass(frozen=True)
class Copies:
    """Bytes between host and device, of one rank.

    Attributes:
        use: to the device, each time that all parameters are gathered.
        up, down: to the device before updates cross, and to the host after.
        cached: on the device for good.
        windows: on the device while updates cross.
        in_step: whether a step waits for ``down``.
    """

    use: float = 0.0
    up: float = 0.0
    down: float = 0.0
    cached: float = 0.0
    windows: float = 0.0
    in_step: bool = False

    def __add__(self, other: "Copies") -> "Copies":
        return Copies(
            self.use + other.use,
            self.up + other.up,
            self.down + other.down,
            self.cached + other.cached,
            self.windows + other.windows,
            self.in_step or other.in_step,
        )

    @classmethod
    def of(
        cls,
        host: HostParameters | None,
        strategy: Strategy,
        sizes: GroupSizes,
        states: ModelStates,
        *,
        few_bits: bool = False,
        offloaded_optimizer: bool = False,
        window: float = 0.0,
    ) -> "Copies":
        """Return what a strategy copies; see Note [Cost of parameters in host memory].

        Args:
            host: how parameters are there; None if they are not.
            strategy: which divides them; with p = N they are on the device.
            sizes: of the groups.
            states: of these parameters, before any sharding.
            few_bits: whether updates cross in few bits.
            offloaded_optimizer: whether optimizer states are on the host, too.
            window: bytes of a bucket of whole parameters.
        """
        if host is None or strategy.p == Placement.N:
            return cls()
        held, mine = states.parameters / sizes.shards(strategy.p), states.updated / sizes.shards(strategy.os)
        if strategy.p == strategy.os or sizes.groups == 1:
            return cls(use=held, down=0.0 if offloaded_optimizer else mine, in_step=True)
        updated, cached = states.updated / sizes.shards(strategy.p), min(host.cache, held)
        return cls(
            use=held - cached,
            up=(updated if few_bits else 0.0) + (mine if offloaded_optimizer else 0.0),
            down=updated,
            cached=cached,
            windows=min(2 * window / sizes.shards(strategy.p), updated),
        )
