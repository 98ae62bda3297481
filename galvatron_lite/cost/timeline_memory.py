"""What one group of devices holds at each of its passes, as ``cost.memory`` counts it. No torch here.

A backward pass counts as it does in the price: with as many micro-batches in memory as there really are then. Between
passes there are parameters, optimizer states, gradients that have formed, and what is kept for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from galvatron_lite.cost.layer import LayerCost
from galvatron_lite.cost.memory import backward_memory, gradients_of, terms, updating_memory, worst_moment
from galvatron_lite.cost.stage import Shape, StageCost
from galvatron_lite.parallelism.pipeline.cost import fills
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass
from galvatron_lite.plans.schema import MemoryBreakdown


@dataclass(frozen=True, slots=True)
class Counts:
    """Micro-batches in memory."""

    whole: tuple[int, ...]  # by virtual stage, between forward and backward
    pending: tuple[int, ...]  # by virtual stage, between the gradient of the input and that of the weights
    formed: bool  # whether gradients are there that form in backward


@dataclass(frozen=True, slots=True)
class MemoryCourse:
    """Memory over the passes of a group."""

    during: tuple[MemoryBreakdown, ...]  # bytes on one device at the worst moment of each
    after: tuple[MemoryBreakdown, ...]  # bytes on one device after each
    counts: tuple[Counts, ...]  # micro-batches in memory during each, its own one included


class GroupMemory:
    """What the devices of a group hold.

    Args:
        shape: of the plan.
        own: costs of the stages that the group runs, in the order of the model.
        context: bytes taken before the first tensor.
    """

    def __init__(self, shape: Shape, costs: Sequence[StageCost], context: int) -> None:
        self._microbatches, self._split = shape.microbatches, shape.schedule.splits_backward
        self._schedule = shape.schedule
        self._own, self._context = tuple(costs), context
        self._chunks = tuple(cost.layers for cost in costs)
        self._buffers = sum(cost.buffers for cost in costs)
        self._at = lru_cache(maxsize=None)(self._during)
        self._rest = lru_cache(maxsize=None)(self._between)

    def over(self, actions: Sequence[Action]) -> MemoryCourse:
        """Memory over a group's passes, in order."""
        nothing = (0,) * len(self._own)
        now, during, after, counts = Counts(nothing, nothing, False), [], [], []
        for action in actions:
            inside, then = _moved(now, action.what, action.chunk, self._split)
            during.append(self._at(action.what, action.chunk, inside))
            after.append(self._rest(then))
            counts.append(inside)
            now = then
        return MemoryCourse(tuple(during), tuple(after), tuple(counts))

    def peak(self, actions: Sequence[Action]) -> MemoryBreakdown:
        """Bytes on one device at the worst moment of a step of these passes."""
        moments = dict.fromkeys((self.updating(), *self.over(actions).during))
        return max(moments, key=lambda memory: memory.total)

    def resting(self, *, formed: bool) -> MemoryBreakdown:
        """Bytes on one device with no micro-batch in memory.

        Args:
            formed: whether gradients are there that form in backward.
        """
        nothing = (0,) * len(self._own)
        return self._rest(Counts(nothing, nothing, formed))

    def updating(self) -> MemoryBreakdown:
        """Bytes on one device while the optimizer runs."""
        layers = [cost for chunk in self._chunks for cost in chunk]
        return updating_memory(layers, self._microbatches, self._buffers, self._context)

    def worst_layer(self, action: Action, counts: Counts) -> int:
        """Place, in its stage, of the layer that is computed at a pass's worst moment."""
        chunk, count = self._chunks[action.chunk], max(counts.whole[action.chunk], 1)
        if action.what is Pass.FORWARD:
            return _forward_place(chunk)
        filled = self._filled(count)
        found = [terms(cost, count, self._microbatches, filled=filled) for cost in chunk]
        return worst_moment(found, optimizer=False).layer

    def _filled(self, count: int) -> bool:
        """Whether a backward with so many micro-batches in memory is the first one, see ``cost.memory.terms``."""
        return len(self._own) == 1 and fills(self._schedule, count, self._microbatches)

    def _during(self, what: Pass, chunk: int, counts: Counts) -> MemoryBreakdown:
        """At the worst moment of a pass, whose own micro-batch is counted."""
        if what is Pass.WEIGHT:
            return replace(self._between(counts), temporary=max(map(self._new_gradient, self._chunks[chunk])))
        if what is Pass.FORWARD:
            return self._forward(chunk, counts)
        memory = backward_memory(
            self._chunks, chunk, counts.whole, self._microbatches, self._buffers, self._context,
            filled=self._filled(counts.whole[chunk]),
        )  # fmt: skip
        begins = replace(memory, activations=memory.activations + self._besides(counts))
        return max(begins, self._within(chunk, counts), key=lambda one: one.total) if self._split else begins

    def _within(self, chunk: int, counts: Counts) -> MemoryBreakdown:
        """At the worst layer of a backward that leaves the gradients of weights: what those of the layers behind it
        wait for is there, and what the layers before it keep."""
        whole, layers, own = _plus(counts.whole, chunk, -1), self._chunks[chunk], self._own[chunk]
        rest, before, behind = self._between(replace(counts, whole=whole)), own.carried, sum(own.pending)
        moments = []
        for cost, pending in zip(layers, own.pending, strict=True):
            beside = cost.gathered + cost.gather + max(cost.working - cost.kept, self._new_gradient(cost))
            # the first moment of the layer's backward, and its last
            moments += [(before + cost.kept + behind - pending, beside), (before + behind, beside)]
            before, behind = before + cost.kept, behind - pending
        held, temporary = max(moments, key=sum)
        return replace(rest, activations=rest.activations + held, temporary=temporary)

    def _new_gradient(self, cost: LayerCost) -> int:
        """Bytes of a weight's gradient beside the sum of those of earlier micro-batches."""
        return cost.new_gradient if self._microbatches > 1 else 0

    def _forward(self, chunk: int, counts: Counts) -> MemoryBreakdown:
        """While the forward of one more micro-batch runs."""
        place, layers = _forward_place(self._chunks[chunk]), self._chunks[chunk]
        earlier = tuple(count - (own == chunk) for own, count in enumerate(counts.whole))
        rest, layer = self._between(replace(counts, whole=earlier)), layers[place]
        gathered = 0 if earlier[chunk] else sum(cost.gathered for cost in layers[: place + 1])
        return replace(
            rest,
            parameters=rest.parameters + gathered + layer.gather,
            activations=rest.activations + sum(cost.kept for cost in layers[: place + 1]) + self._own[chunk].carried,
            temporary=max(layer.forward_working - layer.kept, 0),
            communication=rest.communication + layer.gathering + (layers[place - 1].returning if place else 0),
        )

    def _between(self, counts: Counts) -> MemoryBreakdown:
        """Between passes."""
        layers = [cost for chunk in self._chunks for cost in chunk]
        held = zip(self._chunks, counts.whole, strict=True)
        kept = sum(count * cost.kept for chunk, count in held for cost in chunk)
        return MemoryBreakdown(
            parameters=sum(cost.parameters + cost.copies for cost in layers) + self._gathered(counts),
            gradients=sum(
                int(gradients_of(cost, self._microbatches)) if counts.formed else cost.gradients for cost in layers
            ),
            optimizer=sum(cost.states for cost in layers),
            activations=kept + self._besides(counts),
            communication=self._buffers,
            context=self._context,
        )

    def _gathered(self, counts: Counts) -> int:
        pairs = zip(self._chunks, counts.whole, strict=True)
        return sum(cost.gathered for chunk, count in pairs if count for cost in chunk)

    def _besides(self, counts: Counts) -> int:
        """Copies of tensors made in earlier stages, and what gradients of weights wait for."""
        return sum(
            whole * cost.carried + pending * sum(cost.pending)
            for cost, whole, pending in zip(self._own, counts.whole, counts.pending, strict=True)
        )


@lru_cache(maxsize=1024)
def _moved(now: Counts, what: Pass, chunk: int, split: bool) -> tuple[Counts, Counts]:
    """Micro-batches in memory during a pass, its own one included, and after it; ``split``: with passes of weights."""
    if what is Pass.FORWARD:
        inside = replace(now, whole=_plus(now.whole, chunk, 1))
        return inside, inside
    if what is Pass.WEIGHT:
        return now, replace(now, pending=_plus(now.pending, chunk, -1))
    inside = replace(now, formed=True)
    pending = _plus(now.pending, chunk, 1) if split else now.pending
    return inside, replace(inside, whole=_plus(now.whole, chunk, -1), pending=pending)


def _plus(counts: tuple[int, ...], place: int, more: int) -> tuple[int, ...]:
    return (*counts[:place], counts[place] + more, *counts[place + 1 :])


def _forward_place(layers: Sequence[LayerCost]) -> int:
    """The layer of a stage whose forward holds most; of equal ones the first."""
    before, sizes = 0, []
    for place, cost in enumerate(layers):
        beside = layers[place - 1].returning if place else 0
        own = cost.gathered + cost.gather + cost.gathering + max(cost.forward_working, cost.kept)
        sizes.append(before + own + beside)
        before += cost.kept + cost.gathered
    return max(range(len(sizes)), key=lambda place: sizes[place])
