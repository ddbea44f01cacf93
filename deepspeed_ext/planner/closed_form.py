# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The seconds of an optimizer step in closed form. Pure: the inputs and outputs are plain numbers.

Note [Closed form of a step]
    A step has s micro-batches of L equal layers. Forward takes f, a third of a micro-batch's compute, and backward b.
    If a strategy communicates between groups once per step, r seconds for the reduction and a for the gather, a step
    takes, to within a layer,

        s (f + b) + max(0, r - b (1 - 1/L)) + max(0, a - f (1 - 1/L)).

    In general, its parts are

        updated + (s - 1) (forward + backward) + backward at the boundary + exchange + update.

    *overlapped(A, t, n)*: A seconds of compute, overlapped with n messages of t seconds in all. Compute hides all but
    the last (or the first) message, and a slow link waits for the first (or compute for the last):
    max(A + t/n, t + A/n) = A + max(t/n, t - A (1 - 1/n)). With several links, t is that of the slowest, and each other
    link adds the hop of one message.

    *forward, backward*: the layers' compute, and gathers of sharded parameters, each during the compute of the
    previous layer. If all hops of the gathers take h seconds, a pass takes max(compute, slowest hop, (compute + h)/2),
    because the gather of layer i starts when layer i - 2 has been computed. The first layer waits for h/L. On a host,
    where it starts together with layer i - 1, a pass takes max(compute, h).

    *updated*: the first forward with updated parameters: overlapped(forward, v, messages). If updates do not overlap,
    the forward waits for v.

    *backward* with reductions: overlapped(backward, r, buckets), in which gathers of the pass use their share of a
    link. If a bucket occupies the gathers' link for longer than they are ahead, the pass stalls. If gradients do not
    overlap, the backward waits for r. At the boundary, r includes the reduction over all ranks and the gather of sums.

    *exchange* of Muon's matrices in R rounds: x seconds to owners and back, o to orthogonalize: max(x, o + x/R).

    On a host, hops inside groups run on the cores (``Overlap.within``) and count as compute. So do copies from
    pageable memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LAYERS = 32  # maximum number of layers: larger models are divided into this many parts
FORWARD = 1 / 3  # of a micro-batch's compute
COMPUTE, WITHIN, BETWEEN, UPDATE, HOST = PARTS = ("compute", "within", "between", "update", "host")

Seconds = dict[str, float]  # by part


@dataclass(frozen=True)
class Move:
    """A redistribution of a complete state.

    Attributes:
        within, between: seconds of each hop.
        units: number of messages.
        up, down: seconds of copies to the device before the hops, and to the host after them.
    """

    within: float = 0.0
    between: float = 0.0
    units: int = 1
    up: float = 0.0
    down: float = 0.0


@dataclass(frozen=True)
class Overlap:
    """Communication that overlaps with compute; see Note [Closed form of a step].

    Attributes:
        gradients: whether reductions overlap.
        updates: whether gathers of updated parameters overlap.
        within: whether hops inside groups overlap; if not, they run on the cores that compute.
        at_once: whether both hops of a message run at the same time, as in a collective over all ranks.
        copies: whether copies between host and device overlap.
    """

    gradients: bool = True
    updates: bool = True
    within: bool = True
    at_once: bool = False
    copies: bool = True


@dataclass(frozen=True)
class Step:
    """A step in plain numbers; moves as in ``Strategy.phases``.

    Attributes:
        use: gather of parameters for a forward or backward.
        reduce: reduction of gradients in each micro-batch.
        cross, back: reduction of gradients at the boundary, and gather of their sums.
        updates: gather of updated parameters.
        exchange: Muon's matrices to their owners and back; see ``Strategy.exchange``.
        layers: number of layers.
        gathers: gathers of parameters in a micro-batch: 2, or 1 if they are kept for the backward.
        accumulation: number of micro-batches.
        compute: seconds of a micro-batch.
        update: seconds of the optimizer's step.
        overlap: communication that overlaps with compute.
        orthogonalize: seconds for which a rank orthogonalizes its matrices.
    """

    use: Move
    reduce: Move
    cross: Move
    back: Move
    updates: Move
    exchange: Move
    layers: int
    gathers: int
    accumulation: int
    compute: float
    update: float
    overlap: Overlap
    orthogonalize: float = 0.0

    def seconds(self) -> Seconds:
        """Return the seconds that each part adds to the step; for transfers, only their exposed seconds."""
        under_forward = self.layers if self.gathers > 1 else self.layers - 1
        forward = self._pass(FORWARD * self.compute, under_forward, waits=True)
        middle, last = self._backward(boundary=False), self._backward(boundary=True)
        later = {part: (self.accumulation - 1) * seconds for part, seconds in _total(forward, middle).items()}
        parts = _total(self._first_forward(forward), later, last, self._exchange_rounds(), {UPDATE: self.update})
        return {part: parts.get(part, 0.0) for part in PARTS}

    def busy(self) -> Seconds:
        """Return the seconds for which each part is active, hidden or not."""
        s = self.accumulation
        moves = [(self.use, s * self.gathers), (self.reduce, s)]
        moves += [(move, 1) for move in (self.cross, self.back, self.updates, self.exchange)]
        return {
            COMPUTE: s * self.compute,
            WITHIN: sum(times * move.within for move, times in moves),
            BETWEEN: sum(times * move.between for move, times in moves),
            UPDATE: self.update + self.orthogonalize,
            HOST: sum(times * (move.up + move.down) for move, times in moves),
        }

    def _pass(self, compute: float, gathers: int, waits: bool = False) -> Seconds:
        """Return a forward or backward pass in which each layer is gathered during the compute of the previous layer.

        Args:
            compute: seconds of compute.
            gathers: number of layers that are gathered during the pass.
            waits: whether it waits for the gather of its first layer.
        """
        transfers = _Transfers.for_moves([self.use], self.overlap)
        cores, slowest = compute + sum(transfers.on_cores.values()), max(transfers.on_links.values())
        if self.overlap.within:
            seconds = max(cores, slowest, (cores + transfers.chained) / 2)
        elif self.overlap.at_once:
            seconds = max(cores, slowest)
        else:
            seconds = cores - compute + max(compute, transfers.chained)
        # A forward also waits for its first layer; a backward has that layer from the forward.
        exposed = (gathers * (seconds - cores) + waits * transfers.chained) / self.layers
        return _total({COMPUTE: compute}, transfers.on_cores, transfers.divide(exposed))

    def _first_forward(self, forward: Seconds) -> Seconds:
        """Return the first forward pass with updated parameters, including their gather."""
        if self.overlap.updates:
            return _pass_with_transfers(
                forward, _Transfers.for_moves([self.updates], self.overlap), self.updates.units
            )
        transfers = self._without_overlap([self.updates])
        waits = transfers.chained
        if self.overlap.gradients:  # all messages are queued at once, so one hop hides the other
            longest = max(transfers.on_links.values())
            waits = longest + (waits - longest) / self.updates.units
        return _total(forward, transfers.divide(waits))

    def _backward(self, boundary: bool) -> Seconds:
        """Return a backward pass with its reductions; ``boundary``: whether it is the last micro-batch's."""
        backward = (1 - FORWARD) * self.compute
        # The last layer is still gathered from the forward.
        compute = self._pass(backward, self.layers - 1) if self.gathers > 1 else {COMPUTE: backward}
        moves = [self.reduce, self.cross, self.back] if boundary else [self.reduce]
        if not self.overlap.gradients:
            transfers = self._without_overlap(moves)
            return _total(compute, transfers.divide(transfers.chained))
        transfers = _Transfers.for_moves(moves, self.overlap)
        gathers = _Transfers.for_moves([self.use] if self.gathers > 1 else [], self.overlap)
        return _pass_with_transfers(compute, transfers, self.reduce.units, gathers, self.layers)

    def _without_overlap(self, moves: Sequence[Move]) -> "_Transfers":
        """Return moves during which nothing is computed."""
        return _Transfers.for_moves(moves, Overlap(at_once=self.overlap.at_once))

    def _exchange_rounds(self) -> Seconds:
        """Return the exchange of matrices in rounds. Each round is orthogonalized while others are sent."""
        transfers = _Transfers.for_moves([self.exchange], self.overlap)
        cores = {UPDATE: self.orthogonalize} | transfers.on_cores
        slowest = max(transfers.on_links.values(), default=0.0)
        work = sum(cores.values())
        return _total(cores, transfers.divide(max(slowest - work, slowest / self.exchange.units)))


@dataclass(frozen=True)
class _Transfers:
    """Seconds of redistributions.

    Attributes:
        on_cores: seconds on the cores that compute, by part.
        on_links: seconds on each link.
        chained: seconds on links, if the hops of a message do not overlap.
        in_turn: whether the hops of a message run one after the other rather than at once.
    """

    on_cores: Seconds
    on_links: Seconds
    chained: float
    in_turn: bool

    @classmethod
    def for_moves(cls, moves: Sequence[Move], overlap: Overlap) -> "_Transfers":
        """Add up moves. Hops that do not overlap with compute run on its cores."""
        overlaps = {WITHIN: overlap.within, BETWEEN: True, HOST: overlap.copies}
        on_cores, on_links, chained = dict.fromkeys(overlaps, 0.0), dict.fromkeys(overlaps, 0.0), 0.0
        for move in moves:
            hops = {WITHIN: move.within, BETWEEN: move.between, HOST: move.up + move.down}
            for part, seconds in hops.items():
                (on_links if overlaps[part] else on_cores)[part] += seconds
            hop_seconds = max(move.within, move.between) if overlap.at_once else move.within + move.between
            # Hops on the cores are counted as compute, so they are not part of the chain on links.
            chained += hop_seconds - (0.0 if overlap.within else move.within) + (hops[HOST] if overlap.copies else 0.0)
        return cls(on_cores, on_links, chained, not overlap.at_once)

    def divide(self, seconds: float, without: str = "") -> Seconds:
        """Return these seconds, divided among the links (except ``without``) in proportion to their busy seconds."""
        links = {part: link for part, link in self.on_links.items() if part != without}
        total = sum(links.values())
        return {part: seconds * link / total for part, link in links.items()} if total else {}


def _pass_with_transfers(
    compute: Seconds, transfers: _Transfers, units: int, gathers_on_links: _Transfers | None = None, layers: int = 1
) -> Seconds:
    """Return a pass and the transfers under it; see Note [Closed form of a step].

    Args:
        units: number of messages.
        gathers_on_links: concurrent gathers on the same links.
        layers: number of these gathers.
    """
    base, tail = _total(compute, transfers.on_cores), transfers.chained / units
    length, stalls = sum(base.values()), Seconds()
    ready = (length if transfers.in_turn else sum(compute.values())) / units  # when the first message is on a link
    # The seconds by which each link finishes after the pass; negative if compute hides it.
    waits = {
        part: ready + seconds + max(0.0, transfers.chained - seconds) / units - length
        for part, seconds in transfers.on_links.items()
        if seconds
    }
    if gathers_on_links is not None and gathers_on_links.chained:
        stalls = _stalls(sum(compute.values()), transfers, units, gathers_on_links, layers)
        # The first layer was gathered during the forward, and others before the first message.
        share = max(0.0, 1 - 1 / layers - 1 / units)
        waits = {part: wait + share * gathers_on_links.on_links[part] for part, wait in waits.items()}
    slowest = max(waits, key=lambda part: waits[part], default=BETWEEN)
    if waits.get(slowest, 0.0) <= sum(stalls.values()) + tail:
        return _total(base, stalls, transfers.divide(tail))
    other_hops = max(0.0, transfers.chained - transfers.on_links[slowest]) / units
    return _total(base, {slowest: waits[slowest] - other_hops}, transfers.divide(other_hops, without=slowest))


def _stalls(length: float, transfers: _Transfers, units: int, gathers_on_links: _Transfers, layers: int) -> Seconds:
    """Return the seconds by which gathers that are queued after a bucket delay a pass of this length.

    A gather is two layers ahead of its use. If buckets are smaller than two layers, several are in flight at a time.
    If they are smaller than three, one hop of a bucket hides another's.
    """
    seconds_per_bucket = {
        part: seconds / units for part, seconds in transfers.on_links.items() if gathers_on_links.on_links[part]
    }
    if not any(seconds_per_bucket.values()) or 2 * units > layers:
        return {}
    is_pipelined = 3 * units > layers or not transfers.in_turn
    ahead = max(0.0, 2 * (length - gathers_on_links.chained) / layers)
    stall = max(0.0, (max(seconds_per_bucket.values()) if is_pipelined else sum(seconds_per_bucket.values())) - ahead)
    return {
        part: (units - 1) * stall * seconds / sum(seconds_per_bucket.values())
        for part, seconds in seconds_per_bucket.items()
    }


def _total(*parts: Seconds) -> Seconds:
    sums: Seconds = {}
    for seconds_by_part in parts:
        for part, seconds in seconds_by_part.items():
            sums[part] = sums.get(part, 0.0) + seconds
    return sums
