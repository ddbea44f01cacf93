# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The seconds of an optimizer step in closed form. Pure: plain numbers in, plain numbers out.

Note [Closed form of a step]
    A step has s micro-batches of L equal layers. Forward takes f, a third of a micro-batch's compute, and backward b.
    If a strategy communicates between groups once per step, r seconds for the reduction and a for the gather, a step
    takes, to within a layer,

        s (f + b) + max(0, r - b (1 - 1/L)) + max(0, a - f (1 - 1/L)).

    In general, its parts are

        updated + (s - 1) (forward + backward) + backward at the boundary + exchange + update.

    *overlapped(A, t, n)*: A seconds of compute, and under it n messages of t seconds in all. Compute hides all but the
    last (or the first) message, and a slow link waits for the first (or compute for the last):
    max(A + t/n, t + A/n) = A + max(t/n, t - A (1 - 1/n)). Over several links, t is that of the slowest, and each other
    one adds the hop of one message.

    *forward, backward*: the layers' compute, and gathers of sharded parameters, each under the compute of the layer
    before. Of h seconds over all hops of a gather, a pass takes max(compute, slowest hop, (compute + h)/2), since a
    gather starts when the layer before the last one is computed, and the first layer waits for h/L. On a host, where a
    gather starts when the layer before it does, a pass takes max(compute, h).

    *updated*: the first forward with updated parameters: overlapped(forward, v, messages). If updates do not overlap,
    the forward waits for v.

    *backward* with reductions: overlapped(backward, r, buckets), where gathers of the pass take their share of a link.
    A bucket that occupies the link of gathers for longer than these are ahead stalls the pass. If gradients do not
    overlap, the backward waits for r. At the boundary, r includes the reduction over all ranks and the gather of sums.

    *exchange* of Muon's matrices in R rounds: x seconds to owners and back, o to orthogonalize: max(x, o + x/R).

    Hops inside groups run on the cores of a host (``Overlap.within``) and count as its compute; so do copies from
    pageable memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LAYERS = 32  # the most layers: larger models are divided into this many parts
FORWARD = 1 / 3  # of a micro-batch's compute
COMPUTE, WITHIN, BETWEEN, UPDATE, HOST = PARTS = ("compute", "within", "between", "update", "host")

Seconds = dict[str, float]  # by part


@dataclass(frozen=True)
class Move:
    """A redistribution of a whole state.

    Attributes:
        within, between: seconds over each hop.
        units: number of messages in which it is sent.
        up, down: seconds of copies to the device before, and to the host after the hops.
    """

    within: float = 0.0
    between: float = 0.0
    units: int = 1
    up: float = 0.0
    down: float = 0.0


@dataclass(frozen=True)
class Overlap:
    """What is sent under compute; see Note [Closed form of a step].

    Attributes:
        gradients: whether reductions are.
        updates: whether gathers of updated parameters are.
        within: whether hops inside groups are; if not, the cores that compute run them.
        at_once: whether both hops of a message run at the same time, as in a collective over all ranks.
        copies: whether copies between host and device are.
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
        use: gather of parameters for forward and backward.
        reduce: reduction of gradients in each micro-batch.
        cross, back: reduction of gradients at the boundary, and gather of their sums.
        updates: gather of updated parameters.
        exchange: matrices to their owners, and back; see ``Strategy.exchange``.
        layers: number of layers.
        gathers: gathers of parameters in a micro-batch: 2, or 1 if they are kept for the backward.
        accumulation: number of micro-batches.
        compute: seconds of a micro-batch.
        update: seconds of the optimizer's step.
        overlap: what is sent under compute.
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
        """Return the seconds that each part adds to the step: of transfers those that nothing hides."""
        under_forward = self.layers if self.gathers > 1 else self.layers - 1
        forward = self._pass(FORWARD * self.compute, under_forward, waits=True)
        middle, last = self._backward(boundary=False), self._backward(boundary=True)
        later = {part: (self.accumulation - 1) * seconds for part, seconds in _total(forward, middle).items()}
        parts = _total(self._updated(forward), later, last, self._exchanged(), {UPDATE: self.update})
        return {part: parts.get(part, 0.0) for part in PARTS}

    def busy(self) -> Seconds:
        """Return the seconds for which each part works, hidden or not."""
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
        """Return a forward or backward pass, each layer of which is gathered while the one before is computed.

        Args:
            compute: seconds of its compute.
            gathers: how many layers are gathered under it.
            waits: whether it waits for the gather of its first layer.
        """
        sent = _Sent.of([self.use], self.overlap)
        cores, slowest = compute + sum(sent.on_cores.values()), max(sent.on_links.values())
        if self.overlap.within:
            seconds = max(cores, slowest, (cores + sent.chained) / 2)
        elif self.overlap.at_once:
            seconds = max(cores, slowest)
        else:
            seconds = cores - compute + max(compute, sent.chained)
        exposed = (gathers * (seconds - cores) + waits * sent.chained) / self.layers
        return _total({COMPUTE: compute}, sent.on_cores, sent.divide(exposed))

    def _updated(self, forward: Seconds) -> Seconds:
        """Return the forward pass that uses updated parameters, with their gather."""
        if self.overlap.updates:
            return _overlapped(forward, _Sent.of([self.updates], self.overlap), self.updates.units)
        sent = self._waited([self.updates])
        waits = sent.chained
        if self.overlap.gradients:  # all messages are queued at once, so that one hop hides the other
            longest = max(sent.on_links.values())
            waits = longest + (waits - longest) / self.updates.units
        return _total(forward, sent.divide(waits))

    def _backward(self, boundary: bool) -> Seconds:
        """Return a backward pass with its reductions; ``boundary``: of the last micro-batch."""
        backward = (1 - FORWARD) * self.compute
        compute = self._pass(backward, self.layers - 1) if self.gathers > 1 else {COMPUTE: backward}
        moves = [self.reduce, self.cross, self.back] if boundary else [self.reduce]
        if not self.overlap.gradients:
            sent = self._waited(moves)
            return _total(compute, sent.divide(sent.chained))
        sent = _Sent.of(moves, self.overlap)
        gathered = _Sent.of([self.use] if self.gathers > 1 else [], self.overlap)
        return _overlapped(compute, sent, self.reduce.units, gathered, self.layers)

    def _waited(self, moves: Sequence[Move]) -> "_Sent":
        """Return moves that nothing is computed beside."""
        return _Sent.of(moves, Overlap(at_once=self.overlap.at_once))

    def _exchanged(self) -> Seconds:
        """Return the exchange of matrices in rounds, each orthogonalized while others are sent."""
        sent = _Sent.of([self.exchange], self.overlap)
        cores = {UPDATE: self.orthogonalize} | sent.on_cores
        slowest = max(sent.on_links.values(), default=0.0)
        work = sum(cores.values())
        return _total(cores, sent.divide(max(slowest - work, slowest / self.exchange.units)))


@dataclass(frozen=True)
class _Sent:
    """Seconds of redistributions.

    Attributes:
        on_cores: on the cores that compute, by part.
        on_links: on each link.
        chained: on links, if a message waits for one hop after the other.
        in_turn: whether it does, rather than run its hops at once.
    """

    on_cores: Seconds
    on_links: Seconds
    chained: float
    in_turn: bool

    @classmethod
    def of(cls, moves: Sequence[Move], overlap: Overlap) -> "_Sent":
        """Add up moves; what does not overlap with compute runs on its cores."""
        free = {WITHIN: overlap.within, BETWEEN: True, HOST: overlap.copies}
        on_cores, on_links, chained = dict.fromkeys(free, 0.0), dict.fromkeys(free, 0.0), 0.0
        for move in moves:
            hops = {WITHIN: move.within, BETWEEN: move.between, HOST: move.up + move.down}
            for part, seconds in hops.items():
                (on_links if free[part] else on_cores)[part] += seconds
            both = max(move.within, move.between) if overlap.at_once else move.within + move.between
            chained += both - (0.0 if overlap.within else move.within) + (hops[HOST] if overlap.copies else 0.0)
        return cls(on_cores, on_links, chained, not overlap.at_once)

    def divide(self, seconds: float, without: str = "") -> Seconds:
        """Return these seconds, divided among the links (but for one) as they are busy."""
        links = {part: link for part, link in self.on_links.items() if part != without}
        total = sum(links.values())
        return {part: seconds * link / total for part, link in links.items()} if total else {}


def _overlapped(compute: Seconds, sent: _Sent, units: int, gathered: _Sent | None = None, layers: int = 1) -> Seconds:
    """Return a pass and the transfers under it; see Note [Closed form of a step].

    Args:
        compute: the pass.
        sent: the transfers.
        units: number of their messages.
        gathered: gathers on the same links meanwhile.
        layers: number of these gathers.
    """
    base, tail = _total(compute, sent.on_cores), sent.chained / units
    length, stalls = sum(base.values()), Seconds()
    ready = (length if sent.in_turn else sum(compute.values())) / units  # when the first message is on a link
    waits = {
        part: ready + seconds + max(0.0, sent.chained - seconds) / units - length
        for part, seconds in sent.on_links.items()
        if seconds
    }
    if gathered is not None and gathered.chained:
        stalls = _stalls(sum(compute.values()), sent, units, gathered, layers)
        # The first layer was gathered under the forward, and others before the first message.
        share = max(0.0, 1 - 1 / layers - 1 / units)
        waits = {part: wait + share * gathered.on_links[part] for part, wait in waits.items()}
    slowest = max(waits, key=lambda part: waits[part], default=BETWEEN)
    if waits.get(slowest, 0.0) <= sum(stalls.values()) + tail:
        return _total(base, stalls, sent.divide(tail))
    others = max(0.0, sent.chained - sent.on_links[slowest]) / units
    return _total(base, {slowest: waits[slowest] - others}, sent.divide(others, without=slowest))


def _stalls(length: float, sent: _Sent, units: int, gathered: _Sent, layers: int) -> Seconds:
    """Return the seconds for which gathers that are queued behind a bucket delay a pass of this length.

    A gather is two layers ahead of its use. With buckets of less than two layers, several are on their way at a time,
    and with less than three, one hop of a bucket hides another's.
    """
    held = {part: seconds / units for part, seconds in sent.on_links.items() if gathered.on_links[part]}
    if not any(held.values()) or 2 * units > layers:
        return {}
    hides = 3 * units > layers or not sent.in_turn
    ahead = max(0.0, 2 * (length - gathered.chained) / layers)
    stall = max(0.0, (max(held.values()) if hides else sum(held.values())) - ahead)
    return {part: (units - 1) * stall * seconds / sum(held.values()) for part, seconds in held.items()}


def _total(*parts: Seconds) -> Seconds:
    found: Seconds = {}
    for one in parts:
        for part, seconds in one.items():
            found[part] = found.get(part, 0.0) + seconds
    return found
