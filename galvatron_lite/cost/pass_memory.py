"""What one device of a pipeline group holds during and after each pass of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from galvatron_lite.cost.layer import LayerCost
from galvatron_lite.cost.memory import (
    gradients_of,
    group_memory,
    new_gradient,
    terms,
    updating_memory,
    worst_moment,
)
from galvatron_lite.cost.stage import Shape, StageCost
from galvatron_lite.parallelism.pipeline.cost import fills
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass
from galvatron_lite.plans.schema import MemoryBreakdown


@dataclass(frozen=True, slots=True)
class MicrobatchesHeld:
    """Micro-batches in memory."""

    saved: tuple[int, ...]  # by virtual stage, between forward and backward
    pending: tuple[int, ...]  # by virtual stage, between the gradient of the input and that of the weights
    formed: bool  # whether gradients that form in backward exist


@dataclass(frozen=True, slots=True)
class MemoryCourse:
    """Memory over the passes of a group."""

    during: tuple[MemoryBreakdown, ...]  # bytes on one device at the worst moment of each pass
    after: tuple[MemoryBreakdown, ...]  # bytes on one device after each pass
    held: tuple[MicrobatchesHeld, ...]  # during each pass, with its micro-batch


class GroupMemory:
    """The memory of one device of a group.

    Args:
        shape: of the plan.
        costs: of the stages that the group runs, in the order of the model.
        context: bytes taken before the first tensor.
    """

    def __init__(self, shape: Shape, costs: Sequence[StageCost], context: int) -> None:
        self._microbatches, self._schedule = shape.microbatches, shape.schedule
        self._costs, self._context = tuple(costs), context
        self._chunks = tuple(cost.layers for cost in costs)
        self._layers = [layer for chunk in self._chunks for layer in chunk]
        self._buffers = sum(cost.buffers for cost in costs)
        self._none = (0,) * len(costs)  # micro-batches, by virtual stage
        self._during = lru_cache(maxsize=None)(self._new_during)
        self._between = lru_cache(maxsize=None)(self._new_between)

    def over(self, actions: Sequence[Action]) -> MemoryCourse:
        """Return the memory over a group's passes, in order."""
        held, during, after, held_during = MicrobatchesHeld(self._none, self._none, False), [], [], []
        for action in actions:
            inside, held = _change(held, action.what, action.chunk, self._schedule.splits_backward)
            during.append(self._during(action.what, action.chunk, inside))
            after.append(self._between(held))
            held_during.append(inside)
        return MemoryCourse(tuple(during), tuple(after), tuple(held_during))

    def peak(self, actions: Sequence[Action]) -> MemoryBreakdown:
        """Return the bytes at the worst moment of a step of these passes."""
        moments = dict.fromkeys((self.updating(), *self.over(actions).during))
        return max(moments, key=lambda memory: memory.total)

    def resting(self, *, formed: bool) -> MemoryBreakdown:
        """Return the bytes without a micro-batch in memory; ``formed``: with gradients that form in backward."""
        return self._between(MicrobatchesHeld(self._none, self._none, formed))

    def updating(self) -> MemoryBreakdown:
        """Return the bytes during the update."""
        return updating_memory(self._layers, self._microbatches, self._buffers, self._context)

    def worst_layer(self, action: Action, held: MicrobatchesHeld) -> int:
        """Return the index, in its stage, of the layer that runs at a pass's worst moment."""
        chunk, count = self._chunks[action.chunk], max(held.saved[action.chunk], 1)
        if action.what is Pass.FORWARD:
            return _worst_forward(chunk)
        filled = self._is_filled(count)
        layer_terms = [terms(cost, count, self._microbatches, filled=filled) for cost in chunk]
        return worst_moment(layer_terms, optimizer=False).layer

    def _is_filled(self, count: int) -> bool:
        """Whether a backward with so many micro-batches in memory is the first one, see ``terms``."""
        return len(self._costs) == 1 and fills(self._schedule, count, self._microbatches)

    def _new_during(self, what: Pass, chunk: int, held: MicrobatchesHeld) -> MemoryBreakdown:
        """At the worst moment of a pass."""
        if what is Pass.FORWARD:
            return self._forward(chunk, held)
        if what is Pass.WEIGHT:
            # autograd copies the first gradient of a step that it is handed; before that the gradient is cast
            copies = 2 if self._microbatches == 1 else 1
            new = max(max(copies * cost.new_gradient, cost.cast_gradient) for cost in self._chunks[chunk])
            return replace(self._between(held), temporary=new)
        memory = group_memory(
            self._chunks, ((chunk, held.saved),), self._microbatches, self._buffers, self._context, optimizer=False,
            filled=self._is_filled(held.saved[chunk]),
        )  # fmt: skip
        memory = replace(memory, activations=memory.activations + self._carried_and_pending(held))
        if not self._schedule.splits_backward:
            return memory
        return max(memory, self._input_gradients(chunk, held), key=lambda moment: moment.total)

    def _input_gradients(self, chunk: int, held: MicrobatchesHeld) -> MemoryBreakdown:
        """At the worst layer of a backward that leaves the gradients of weights to a later pass.

        Later layers of the stage hold what those gradients are made from, earlier layers their saved activations.
        Inputs of products stay while the gradients of the layer's outputs come.
        """
        stage = self._costs[chunk]
        rest = self._between(replace(held, saved=_plus(held.saved, chunk, -1)))
        saved, pending = stage.carried, sum(stage.pending)
        moments = []
        for cost, waiting, output in zip(stage.layers, stage.pending, stage.output_gradients, strict=True):
            working = max(cost.working - cost.kept, new_gradient(cost, self._microbatches))
            temporary = cost.gathered + cost.transient_parameters + working
            moments.append((saved + cost.kept + pending - waiting + output, temporary))  # in the layer's backward
            moments.append((saved + pending, temporary))  # at its end
            saved, pending = saved + cost.kept, pending - waiting
        activations, temporary = max(moments, key=sum)
        return replace(rest, activations=rest.activations + activations, temporary=temporary)

    def _forward(self, chunk: int, held: MicrobatchesHeld) -> MemoryBreakdown:
        """While the forward of one more micro-batch runs."""
        layers = self._chunks[chunk]
        index = _worst_forward(layers)
        layer, until = layers[index], layers[: index + 1]
        earlier = _plus(held.saved, chunk, -1)
        rest = self._between(replace(held, saved=earlier))
        gathered = 0 if earlier[chunk] else sum(cost.gathered for cost in until)
        offloaded = layers[index - 1].offloaded if index else 0
        return replace(
            rest,
            parameters=rest.parameters + gathered + layer.transient_parameters,
            activations=rest.activations + sum(cost.kept for cost in until) + self._costs[chunk].carried,
            temporary=max(layer.forward_working - layer.kept, 0),
            communication=rest.communication + layer.gather_buffer + offloaded,
        )

    def _new_between(self, held: MicrobatchesHeld) -> MemoryBreakdown:
        """Between passes."""
        running = [(cost, count) for chunk, count in zip(self._chunks, held.saved, strict=True) for cost in chunk]
        return MemoryBreakdown(
            parameters=sum(cost.parameters + cost.weight_copies for cost in self._layers)
            + sum(cost.gathered for cost, count in running if count),
            gradients=sum(
                int(gradients_of(cost, self._microbatches)) if held.formed else cost.gradients for cost in self._layers
            ),
            optimizer=sum(cost.states for cost in self._layers),
            activations=sum(count * cost.kept for cost, count in running) + self._carried_and_pending(held),
            communication=self._buffers,
            context=self._context,
        )

    def _carried_and_pending(self, held: MicrobatchesHeld) -> int:
        """Copies of tensors of earlier stages, and what gradients of weights are made from."""
        return sum(
            saved * cost.carried + pending * sum(cost.pending)
            for cost, saved, pending in zip(self._costs, held.saved, held.pending, strict=True)
        )


@lru_cache(maxsize=1024)
def _change(
    held: MicrobatchesHeld, what: Pass, chunk: int, splits_backward: bool
) -> tuple[MicrobatchesHeld, MicrobatchesHeld]:
    """Micro-batches in memory during a pass, with its micro-batch, and after it."""
    if what is Pass.FORWARD:
        inside = replace(held, saved=_plus(held.saved, chunk, 1))
        return inside, inside
    if what is Pass.WEIGHT:
        return held, replace(held, pending=_plus(held.pending, chunk, -1))
    inside = replace(held, formed=True)
    pending = _plus(held.pending, chunk, 1) if splits_backward else held.pending
    return inside, replace(inside, saved=_plus(held.saved, chunk, -1), pending=pending)


def _plus(counts: tuple[int, ...], index: int, change: int) -> tuple[int, ...]:
    return (*counts[:index], counts[index] + change, *counts[index + 1 :])


def _worst_forward(layers: Sequence[LayerCost]) -> int:
    """The layer of a stage whose forward holds most; of equal ones the first."""
    before, sizes = 0, []
    for index, cost in enumerate(layers):
        offloaded = layers[index - 1].offloaded if index else 0
        gathered = cost.gathered + cost.transient_parameters + cost.gather_buffer
        sizes.append(before + gathered + max(cost.forward_working, cost.kept) + offloaded)
        before += cost.kept + cost.gathered
    return max(range(len(sizes)), key=lambda index: sizes[index])
