"""The most bytes one device of a stage holds at any moment of a step.

Symbols, for layers 1..L of the stage in running order, k micro-batches in flight, m micro-batches a step:

    r_l   at rest: parameters, optimizer states, gradients (also those that only form in backward)
    c_l   copies of weights that all passes share and that are gone when the optimizer runs; their gradients, as large,
          last until a backward pass ends where m > 1 (``passing_of``), and are in A and, negative, in q
    a_l   kept from forward to backward, one micro-batch
    p_l   parameters gathered from forward until the layer's own backward ends
    w_l   live while the layer itself computes, beyond all of the above of earlier layers (its own a_l, p_l included);
          also the largest gradient of one weight, beside the buffer that it is added to
    g_l   parameters gathered for this layer alone; the layer after it prefetches them in backward; and activations that
          wait in host memory, on their way beside the layer after it in either pass
    d_l   the buffers its gradients are reduced from; they live on in the backward of the layer before it
    u_l   temporary bytes of the optimizer

In backward of layer l of the oldest micro-batch, when k - 1 others are whole in memory, the device holds

    A + sum_{j<l} q_j + max(w_l + g_{l-1}, v_l + g_{l-1} + d_{l+1})
    with  A = sum_l (r_l + c_l + (k - 1) a_l)   and   q_l = a_l + p_l   (less forming gradients where m = 1: ``terms``),

where v_l is the part of w_l in the middle of backward (d_{l+1} is gone when the layer reduces its own). The optimizer
holds sum_l (r_l + u_l). The peak is the greatest of these L + 1 figures plus what the stage holds throughout.

Where all micro-batches of a step are in memory when the first backward begins, shards of gradients f_j of the layers
before l have not formed in it. In the second they have, but there is one micro-batch less, and parameters are gathered
for the layer at work and the next alone, as no forward comes between. Neither moment holds more than the one above with
q_j - min(f_j, q_j) in place of q_j:   sum_{j<l} min(f_j, q_j) <= min(sum_{j<l} f_j, sum_j a_j + sum_{j<l} p_j).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from galvatron_lite.arrays import Whole, largest, least
from galvatron_lite.cost.layer import LayerCost
from galvatron_lite.parallelism.pipeline.cost import fills
from galvatron_lite.parallelism.pipeline.schedule import Action, Moments, Pass
from galvatron_lite.plans.schema import MemoryBreakdown

if TYPE_CHECKING:
    from galvatron_lite.cost.stage import Shape, StageCost

UNUSED_SHARE = 0.15
"""Share of reserved memory that is lost to fragmentation; see ``reserved``."""


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """The figures of one layer that the peak is made of, in whole bytes; see the module's symbols."""

    rest: Whole  # r + c + (k - 1) a: adds to every moment
    prefix: Whole  # q: adds to the moments of later layers
    peak: Whole  # w
    middle: Whole  # v
    prefetched: Whole  # g
    pending: Whole  # d
    updated: Whole  # r + u: adds to the optimizer's moment


def resting(cost: LayerCost, microbatches: int) -> Whole:
    """Bytes of parameters, gradients and optimizer states of a layer, and of copies of weights that its passes share;
    gradients that form in backward are counted."""
    return cost.parameters + cost.copies + cost.states + gradients_of(cost, microbatches)


def gradients_of(cost: LayerCost, microbatches: int) -> Whole:
    """Bytes of gradients at rest once they have formed; with several micro-batches those that stay whole are whole."""
    return cost.gradients + cost.formed_gradients + (cost.accumulated if microbatches > 1 else 0)


def passing_of(cost: LayerCost, microbatches: int) -> Whole:
    """Bytes of gradients that last until a backward pass ends. Copies of weights that several micro-batches share were
    made in the first one, before all else of a later one: autograd takes their gradients to the weights last."""
    return cost.passing_gradients + (cost.copies - cost.frozen_copies if microbatches > 1 else 0)


def late_gradients(cost: LayerCost) -> Whole:
    """Bytes of gradients that a stage is sure to lack in the backward of later layers, if that is the first of several
    and all micro-batches are in memory (min(f, q) of the module's text)."""
    return least(cost.formed_gradients + cost.accumulated, cost.kept + cost.gathered)


def terms(cost: LayerCost, in_flight: int, microbatches: int, *, filled: bool = False) -> MemoryTerms:
    """The memory figures of a layer with so many micro-batches in flight; arrays where the costs are.

    With one micro-batch a step, gradients of layer l that only form in backward do not exist yet in the backward of
    later layers, so they leave the prefix; with more they are counted as there throughout. Those that last for one
    backward pass never exist in the backward of later layers, nor when the optimizer runs.

    Args:
        cost: of the layer.
        in_flight: micro-batches whose activations are held at once (k).
        microbatches: a step (m).
        filled: whether that many are there in the first backward of the step alone (``pipeline.cost.fills``).
    """
    passing, rest = passing_of(cost, microbatches), resting(cost, microbatches)
    gathered = cost.gathered + cost.gather
    full_gradients = cost.full_gradients if microbatches == 1 else largest(cost.full_gradients - cost.accumulated, 0)
    middle = gathered + largest(cost.working, cost.at_weights + _new_gradient(cost, microbatches)) + full_gradients
    end = largest(cost.gathered - cost.gathering, 0) + full_gradients + cost.reducing + cost.bucket
    forward = gathered + cost.gathering + cost.forward_working
    prefix = cost.kept + cost.gathered
    return MemoryTerms(
        rest=rest + passing + (in_flight - 1) * cost.kept,
        prefix=prefix - passing - _unformed(cost, microbatches, filled),
        peak=largest(middle, end, forward, prefix),
        middle=middle,
        prefetched=cost.gather + cost.returning,
        pending=cost.reducing + cost.bucket,
        updated=rest - cost.copies + cost.updating,
    )


def _unformed(cost: LayerCost, microbatches: int, filled: bool) -> Whole:
    """Bytes of a layer's gradients that are not there in the backward of later layers."""
    if microbatches == 1:
        return cost.formed_gradients
    return late_gradients(cost) if filled else 0


def _new_gradient(cost: LayerCost, microbatches: int) -> Whole:
    """Bytes of a weight's gradient beside the buffer of gradients; where micro-batches share copies of weights, theirs
    count elsewhere (``passing_of``)."""
    return cost.new_gradient if microbatches > 1 else cost.cast_gradient


@dataclass(frozen=True, slots=True)
class PeakMoment:
    """The worst moment of a stage."""

    size: int  # bytes, without what the stage holds throughout
    layer: int  # place of the layer whose backward (or forward) it is; -1 for the optimizer


def worst_moment(layers: Sequence[MemoryTerms], optimizer: bool = True) -> PeakMoment:
    """The greatest of the moments; of equal ones the optimizer (where it is looked at), then the first layer."""
    total, prefix = sum(term.rest for term in layers), 0
    worst = PeakMoment(sum(term.updated for term in layers) if optimizer else -1, -1)
    before = [0, *(term.prefetched for term in layers)]
    after = [*(term.pending for term in layers[1:]), 0]
    for place, term in enumerate(layers):
        local = max(term.peak, term.middle + after[place]) + before[place]
        size = total + prefix + local
        if size > worst.size:
            worst = PeakMoment(size, place)
        prefix += term.prefix
    return worst


def stage_memory(
    costs: Sequence[LayerCost],
    in_flight: int,
    microbatches: int,
    buffers: int,
    context: int,
    optimizer: bool = True,
    *,
    filled: bool = False,
) -> MemoryBreakdown:
    """Bytes on one device at the stage's worst moment, by what they are for; the parts add up to the peak.

    Args:
        costs: of the layers, in running order.
        in_flight: micro-batches whose activations are held at once (k).
        microbatches: a step (m).
        buffers: bytes of send and receive buffers.
        context: bytes taken before the first tensor.
        optimizer: whether the optimizer's moment is looked at too.
        filled: see ``terms``.
    """
    peak = worst_moment([terms(cost, in_flight, microbatches, filled=filled) for cost in costs], optimizer)
    states = sum(cost.states for cost in costs)
    parameters = sum(cost.parameters + cost.copies for cost in costs)
    if peak.layer < 0:
        return updating_memory(costs, microbatches, buffers, context)
    gradients = _gradients_at(costs, peak.layer, microbatches, filled)
    parameters += sum(cost.gathered for cost in costs[: peak.layer + 1]) + costs[peak.layer].gather
    activations = (in_flight - 1) * sum(cost.kept for cost in costs) + sum(c.kept for c in costs[: peak.layer + 1])
    before = costs[peak.layer - 1] if peak.layer else None
    beside = 0 if before is None else before.gather + before.returning
    rest = peak.size - parameters - gradients - states - activations
    collective = min(max(rest, 0), beside + costs[peak.layer].reducing + costs[peak.layer].gathering)
    return MemoryBreakdown(parameters, gradients, states, activations, rest - collective, collective + buffers, context)


def updating_memory(costs: Sequence[LayerCost], microbatches: int, buffers: int, context: int) -> MemoryBreakdown:
    """Bytes at the optimizer's moment."""
    return MemoryBreakdown(
        sum(cost.parameters for cost in costs),
        sum(gradients_of(cost, microbatches) for cost in costs),
        sum(cost.states for cost in costs),
        temporary=sum(cost.updating for cost in costs),
        communication=buffers,
        context=context,
    )


def group_memory(
    chunks: Sequence[Sequence[LayerCost]],
    held: Moments,
    microbatches: int,
    buffers: int,
    context: int,
    *,
    filled: bool = False,
) -> MemoryBreakdown:
    """``stage_memory`` of devices that run several virtual stages: the worst of their moments.

    Args:
        chunks: layers of each virtual stage.
        held: chunks whose backward pass may be the worst moment, and micro-batches of every chunk in memory then.
        microbatches: a step.
        buffers: bytes of send and receive buffers of all chunks.
        context: bytes taken before the first tensor.
        filled: of devices that run one stage; see ``terms``.
    """
    if len(chunks) == 1:
        return stage_memory(chunks[0], held[0][1][0], microbatches, buffers, context, filled=filled)
    moments = [updating_memory([cost for chunk in chunks for cost in chunk], microbatches, buffers, context)]
    resting = {id(chunk): _resting(chunk, microbatches) for chunk in chunks}
    running: dict[tuple[int, int], MemoryBreakdown] = {}
    for group, counts in held:
        key = id(chunks[group]), max(counts[group], 1)
        if key not in running:
            running[key] = stage_memory(chunks[group], key[1], microbatches, buffers, context, optimizer=False)
        others = [(resting[id(chunk)], counts[place]) for place, chunk in enumerate(chunks) if place != group]
        moments.append(_beside(running[key], others))
    return max(moments, key=lambda memory: memory.total)


def backward_memory(
    chunks: Sequence[Sequence[LayerCost]],
    running: int,
    counts: Sequence[int],
    microbatches: int,
    buffers: int,
    context: int,
    *,
    filled: bool = False,
) -> MemoryBreakdown:
    """Bytes at the worst moment of a backward pass of virtual stage ``running`` (forward moments of as many
    micro-batches included), with so many micro-batches of every virtual stage in memory, its own one counted; else as
    ``group_memory``."""
    memory = stage_memory(
        chunks[running], max(counts[running], 1), microbatches, buffers, context, optimizer=False, filled=filled
    )  # fmt: skip
    others = [
        (_resting(chunk, microbatches), counts[place]) for place, chunk in enumerate(chunks) if place != running
    ]  # fmt: skip
    return _beside(memory, others)


@dataclass(frozen=True, slots=True)
class _Resting:
    """Bytes of a chunk that does not compute; ``gathered`` and ``kept`` where micro-batches of it are in flight."""

    parameters: int
    gathered: int
    gradients: int
    states: int
    kept: int


def _resting(chunk: Sequence[LayerCost], microbatches: int) -> _Resting:
    return _Resting(
        sum(cost.parameters + cost.copies for cost in chunk),
        sum(cost.gathered for cost in chunk),
        sum(gradients_of(cost, microbatches) for cost in chunk),
        sum(cost.states for cost in chunk),
        sum(cost.kept for cost in chunk),
    )


def _beside(memory: MemoryBreakdown, others: Sequence[tuple[_Resting, int]]) -> MemoryBreakdown:
    """With what the other chunks of the same devices hold, each with so many micro-batches in flight."""
    return replace(
        memory,
        parameters=memory.parameters + sum(rest.parameters + (rest.gathered if held else 0) for rest, held in others),
        gradients=memory.gradients + sum(rest.gradients for rest, _ in others),
        optimizer=memory.optimizer + sum(rest.states for rest, _ in others),
        activations=memory.activations + sum(held * rest.kept for rest, held in others),
    )


def reserved(memory: MemoryBreakdown, capacity: int, buffers: int = 0) -> int:
    """Bytes that the driver (``nvidia-smi``) shows as used where a device's tensors take ``memory`` at their peak.

    PyTorch's caching allocator keeps freed blocks that no later tensor fits into. Guo et al. 2024 (GMLake,
    arXiv 2401.08156, abstract) find 15 % of its memory lost to that on average in training of language models. Before
    it fails it gives them back, so that what is reserved never exceeds the device.

    Args:
        memory: predicted at the peak; ``context`` included once.
        capacity: bytes of the device.
        buffers: bytes of gradient buffers that are allocated once, between which no gaps form.
    """
    tensors = memory.total - memory.context - buffers
    return max(memory.total, min(round(tensors / (1.0 - UNUSED_SHARE)) + buffers + memory.context, capacity))


def _gradients_at(costs: Sequence[LayerCost], layer: int, microbatches: int, filled: bool) -> int:
    """Bytes of gradients at rest in the backward of one layer."""
    lacking = sum(int(_unformed(cost, microbatches, filled)) for cost in costs[:layer])
    passing = sum(cost.passing_gradients for cost in costs[layer:])
    return sum(int(gradients_of(cost, microbatches)) for cost in costs) - lacking + passing


@dataclass(frozen=True, slots=True)
class Counts:
    """Micro-batches in memory."""

    saved: tuple[int, ...]  # by virtual stage, between forward and backward
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
        chunk, count = self._chunks[action.chunk], max(counts.saved[action.chunk], 1)
        if action.what is Pass.FORWARD:
            return _forward_place(chunk)
        filled = self._filled(count)
        layer_terms = [terms(cost, count, self._microbatches, filled=filled) for cost in chunk]
        return worst_moment(layer_terms, optimizer=False).layer

    def _filled(self, count: int) -> bool:
        """Whether a backward with so many micro-batches in memory is the first one, see ``cost.memory.terms``."""
        return len(self._own) == 1 and fills(self._schedule, count, self._microbatches)

    def _during(self, what: Pass, chunk: int, counts: Counts) -> MemoryBreakdown:
        """At the worst moment of a pass, whose own micro-batch is counted."""
        if what is Pass.WEIGHT:
            # handed to autograd, which copies the first of a step; to begin with, beside the one that it is cast from
            handed = 2 if self._microbatches == 1 else 1
            new = max(max(handed * cost.new_gradient, cost.cast_gradient) for cost in self._chunks[chunk])
            return replace(self._between(counts), temporary=new)
        if what is Pass.FORWARD:
            return self._forward(chunk, counts)
        memory = backward_memory(
            self._chunks, chunk, counts.saved, self._microbatches, self._buffers, self._context,
            filled=self._filled(counts.saved[chunk]),
        )  # fmt: skip
        begins = replace(memory, activations=memory.activations + self._besides(counts))
        return max(begins, self._within(chunk, counts), key=lambda one: one.total) if self._split else begins

    def _within(self, chunk: int, counts: Counts) -> MemoryBreakdown:
        """At the worst layer of a backward that leaves the gradients of weights: what those of the layers behind it
        wait for is there, and what the layers before it keep. Inputs that they are made from stay while the gradients
        of the layer's outputs come."""
        complete, layers, chunk_cost = _plus(counts.saved, chunk, -1), self._chunks[chunk], self._own[chunk]
        rest, before, behind = (
            self._between(replace(counts, saved=complete)),
            chunk_cost.carried,
            sum(chunk_cost.pending),
        )
        moments = []
        for cost, pending, output_gradient in zip(layers, chunk_cost.pending, chunk_cost.output_gradients, strict=True):
            new = _new_gradient(cost, self._microbatches)
            beside = cost.gathered + cost.gather + max(cost.working - cost.kept, new)
            # in the layer's backward, and at its end
            moments += [(before + cost.kept + behind - pending + output_gradient, beside), (before + behind, beside)]
            before, behind = before + cost.kept, behind - pending
        held, temporary = max(moments, key=sum)
        return replace(rest, activations=rest.activations + held, temporary=temporary)

    def _forward(self, chunk: int, counts: Counts) -> MemoryBreakdown:
        """While the forward of one more micro-batch runs."""
        place, layers = _forward_place(self._chunks[chunk]), self._chunks[chunk]
        earlier = tuple(count - (other_chunk == chunk) for other_chunk, count in enumerate(counts.saved))
        rest, layer = self._between(replace(counts, saved=earlier)), layers[place]
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
        held = zip(self._chunks, counts.saved, strict=True)
        kept = sum(count * cost.kept for chunk, count in held for cost in chunk)
        return MemoryBreakdown(
            parameters=sum(cost.parameters + cost.copies for cost in layers)
            + sum(
                cost.gathered
                for chunk, count in zip(self._chunks, counts.saved, strict=True)
                if count
                for cost in chunk
            ),
            gradients=sum(
                int(gradients_of(cost, self._microbatches)) if counts.formed else cost.gradients for cost in layers
            ),
            optimizer=sum(cost.states for cost in layers),
            activations=kept + self._besides(counts),
            communication=self._buffers,
            context=self._context,
        )

    def _besides(self, counts: Counts) -> int:
        """Copies of tensors made in earlier stages, and what gradients of weights wait for."""
        return sum(
            complete * cost.carried + pending * sum(cost.pending)
            for cost, complete, pending in zip(self._own, counts.saved, counts.pending, strict=True)
        )


@lru_cache(maxsize=1024)
def _moved(now: Counts, what: Pass, chunk: int, split: bool) -> tuple[Counts, Counts]:
    """Micro-batches in memory during a pass, its own one included, and after it; ``split``: with passes of weights."""
    if what is Pass.FORWARD:
        inside = replace(now, saved=_plus(now.saved, chunk, 1))
        return inside, inside
    if what is Pass.WEIGHT:
        return now, replace(now, pending=_plus(now.pending, chunk, -1))
    inside = replace(now, formed=True)
    pending = _plus(now.pending, chunk, 1) if split else now.pending
    return inside, replace(inside, saved=_plus(now.saved, chunk, -1), pending=pending)


def _plus(counts: tuple[int, ...], place: int, more: int) -> tuple[int, ...]:
    return (*counts[:place], counts[place] + more, *counts[place + 1 :])


def _forward_place(layers: Sequence[LayerCost]) -> int:
    """The layer of a stage whose forward holds most; of equal ones the first."""
    before, sizes = 0, []
    for place, cost in enumerate(layers):
        beside = layers[place - 1].returning if place else 0
        at_forward = cost.gathered + cost.gather + cost.gathering + max(cost.forward_working, cost.kept)
        sizes.append(before + at_forward + beside)
        before += cost.kept + cost.gathered
    return max(range(len(sizes)), key=lambda place: sizes[place])
