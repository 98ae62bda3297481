"""The most bytes that one device of a stage holds at any moment of a step.

Symbols, for layers 1..L of the stage in running order, k micro-batches in flight, m micro-batches a step:

    r_l   at rest: parameters, optimizer states, gradients (also those that only form in backward)
    c_l   copies of weights that all passes share and that are freed before the update; their gradients, as large, last
          to the end of a backward pass if m > 1 (``passing_of``), and are in A and, negative, in q
    a_l   activations saved from forward to backward, one micro-batch
    p_l   parameters gathered from forward to the end of the layer's backward
    w_l   live while the layer computes, beyond all of the above of earlier layers (with its own a_l and p_l); also the
          largest gradient of one weight, beside the buffer that it is added to
    g_l   parameters gathered for this layer alone, which the layer after it prefetches in backward; and activations
          that wait in host memory, copied during the layer after it in either pass
    d_l   the buffers its gradients are reduced from; they live on in the backward of the layer before it
    u_l   temporary bytes of the optimizer

In backward of layer l of the oldest micro-batch, with all activations of k - 1 others in memory, the device holds

    A + sum_{j<l} q_j + max(w_l + g_{l-1}, v_l + g_{l-1} + d_{l+1})
    with  A = sum_l (r_l + c_l + (k - 1) a_l)   and   q_l = a_l + p_l   (less forming gradients if m = 1: ``terms``),

where v_l is the part of w_l in the middle of backward (d_{l+1} is freed when the layer reduces its own gradients). The
update holds sum_l (r_l + u_l). The peak is the greatest of these L + 1 figures plus what the stage holds throughout.

If all micro-batches of a step are in memory when the first backward begins, shards of gradients f_j of the layers
before l have not formed in it. In the second they have, but there is one micro-batch less, and parameters are gathered
for the layer at work and the next alone, as no forward comes between. Neither moment holds more than the one above with
q_j - min(f_j, q_j) in place of q_j:   sum_{j<l} min(f_j, q_j) <= min(sum_{j<l} f_j, sum_j a_j + sum_{j<l} p_j).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from galvatron_lite.arrays import Whole, largest, least
from galvatron_lite.cost.layer import LayerCost
from galvatron_lite.parallelism.pipeline.schedule import Moments
from galvatron_lite.plans.schema import MemoryBreakdown

UNUSED_SHARE = 0.15
"""Share of reserved memory that is lost to fragmentation; see ``reserved``."""


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """The figures of one layer that the peak is made of, in bytes; see the module's symbols."""

    rest: Whole  # r + c + (k - 1) a: adds to every moment
    prefix: Whole  # q: adds to the moments of later layers
    peak: Whole  # w
    middle: Whole  # v
    prefetched: Whole  # g
    pending: Whole  # d
    updated: Whole  # r + u: adds to the moment of the update


def resting(cost: LayerCost, microbatches: int) -> Whole:
    """Return the bytes of a layer at rest: parameters, copies of weights, optimizer states, and formed gradients."""
    return cost.parameters + cost.weight_copies + cost.states + gradients_of(cost, microbatches)


def gradients_of(cost: LayerCost, microbatches: int) -> Whole:
    """Return the bytes of a layer's gradients at rest once they have formed."""
    return cost.gradients + cost.formed_gradients + (cost.accumulated if microbatches > 1 else 0)


def passing_of(cost: LayerCost, microbatches: int) -> Whole:
    """Return the bytes of gradients that last to the end of a backward pass.

    Copies of weights that several micro-batches share are made in the first of them, before all else of a later one:
    autograd casts their gradients last.
    """
    return cost.passing_gradients + (cost.weight_copies - cost.frozen_copies if microbatches > 1 else 0)


def late_gradients(cost: LayerCost) -> Whole:
    """Return the bytes of gradients that have surely not formed in the backward of later layers, if that is the first
    of several and all micro-batches are in memory (min(f, q) of the module's text)."""
    return least(cost.formed_gradients + cost.accumulated, cost.kept + cost.gathered)


def unformed_gradients(cost: LayerCost, microbatches: int, *, filled: bool) -> Whole:
    """Return the bytes of a layer's gradients that are not there in the backward of later layers; see ``terms``."""
    if microbatches == 1:
        return cost.formed_gradients
    return late_gradients(cost) if filled else 0


def new_gradient(cost: LayerCost, microbatches: int) -> Whole:
    """Return the bytes of the largest new gradient of a weight, beside the buffer that it is added to.

    Several micro-batches share copies of weights, whose gradients are in ``passing_of``.
    """
    return cost.new_gradient if microbatches > 1 else cost.cast_gradient


def terms(cost: LayerCost, in_flight: int, microbatches: int, *, filled: bool = False) -> MemoryTerms:
    """Return the memory figures of a layer; arrays if the costs are.

    With one micro-batch a step, gradients that form in the backward of layer l do not exist in the backward of later
    layers, and leave the prefix; with more they count throughout. Gradients that last for one backward pass never
    exist in the backward of later layers, nor in the update.

    Args:
        cost: of the layer.
        in_flight: micro-batches whose activations are held at once (k).
        microbatches: a step (m).
        filled: whether so many are held in the first backward of the step alone (``pipeline.cost.fills``).
    """
    passing, rest = passing_of(cost, microbatches), resting(cost, microbatches)
    gathered = cost.gathered + cost.transient_parameters
    full_gradients = cost.full_gradients if microbatches == 1 else largest(cost.full_gradients - cost.accumulated, 0)
    weight_working = cost.weight_working + new_gradient(cost, microbatches)
    middle = gathered + largest(cost.working, weight_working) + full_gradients
    reduced = cost.reduce_buffer + cost.bucket_copy
    end = largest(cost.gathered - cost.gather_buffer, 0) + full_gradients + reduced
    forward = gathered + cost.gather_buffer + cost.forward_working
    prefix = cost.kept + cost.gathered
    return MemoryTerms(
        rest=rest + passing + (in_flight - 1) * cost.kept,
        prefix=prefix - passing - unformed_gradients(cost, microbatches, filled=filled),
        peak=largest(middle, end, forward, prefix),
        middle=middle,
        prefetched=cost.transient_parameters + cost.offloaded,
        pending=reduced,
        updated=rest - cost.weight_copies + cost.optimizer_working,
    )


@dataclass(frozen=True, slots=True)
class PeakMoment:
    """The worst moment of a stage."""

    size: int  # bytes, without what the stage holds throughout
    layer: int  # index of the layer whose backward (or forward) it is; -1 for the update


def worst_moment(layers: Sequence[MemoryTerms], optimizer: bool = True) -> PeakMoment:
    """Find the moment of most bytes; of equal ones the update (if ``optimizer``), then the first layer."""
    total, prefix = sum(term.rest for term in layers), 0
    worst = PeakMoment(sum(term.updated for term in layers) if optimizer else -1, -1)
    before = [0, *(term.prefetched for term in layers)]
    after = [*(term.pending for term in layers[1:]), 0]
    for index, term in enumerate(layers):
        size = total + prefix + max(term.peak, term.middle + after[index]) + before[index]
        if size > worst.size:
            worst = PeakMoment(size, index)
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
    """Return the bytes on one device at the stage's worst moment; the parts add up to the peak.

    Args:
        costs: of the layers, in running order.
        in_flight: micro-batches whose activations are held at once (k).
        microbatches: a step (m).
        buffers: bytes of send and receive buffers.
        context: bytes taken before the first tensor.
        optimizer: whether the update counts too.
        filled: see ``terms``.
    """
    peak = worst_moment([terms(cost, in_flight, microbatches, filled=filled) for cost in costs], optimizer)
    if peak.layer < 0:
        return updating_memory(costs, microbatches, buffers, context)
    running, until = costs[peak.layer], costs[: peak.layer + 1]
    states = sum(cost.states for cost in costs)
    parameters = sum(cost.parameters + cost.weight_copies for cost in costs)
    parameters += sum(cost.gathered for cost in until) + running.transient_parameters
    gradients = sum(int(gradients_of(cost, microbatches)) for cost in costs)
    gradients -= sum(int(unformed_gradients(cost, microbatches, filled=filled)) for cost in costs[: peak.layer])
    gradients += sum(cost.passing_gradients for cost in costs[peak.layer :])
    activations = (in_flight - 1) * sum(cost.kept for cost in costs) + sum(cost.kept for cost in until)
    rest = peak.size - parameters - gradients - states - activations
    collective = running.reduce_buffer + running.gather_buffer
    if peak.layer:
        collective += costs[peak.layer - 1].transient_parameters + costs[peak.layer - 1].offloaded
    collective = min(max(rest, 0), collective)
    return MemoryBreakdown(parameters, gradients, states, activations, rest - collective, collective + buffers, context)


def updating_memory(costs: Sequence[LayerCost], microbatches: int, buffers: int, context: int) -> MemoryBreakdown:
    """Return the bytes on one device during the update; arguments as of ``stage_memory``."""
    return MemoryBreakdown(
        sum(cost.parameters for cost in costs),
        sum(gradients_of(cost, microbatches) for cost in costs),
        sum(cost.states for cost in costs),
        temporary=sum(cost.optimizer_working for cost in costs),
        communication=buffers,
        context=context,
    )


def group_memory(
    chunks: Sequence[Sequence[LayerCost]],
    held: Moments,
    microbatches: int,
    buffers: int,
    context: int,
    optimizer: bool = True,
    *,
    filled: bool = False,
) -> MemoryBreakdown:
    """Return the bytes on one device of a group that runs several virtual stages, at the worst moment.

    Args:
        chunks: layers of each virtual stage.
        held: moments to compare: the chunk whose backward (or forward) runs, and the micro-batches of every chunk in
            memory then, with the running one.
        microbatches: a step.
        buffers: bytes of send and receive buffers of all chunks.
        context: bytes taken before the first tensor.
        optimizer: whether the update counts too.
        filled: see ``terms``; for a single chunk.
    """
    if len(chunks) == 1:
        _, counts = held[0]
        return stage_memory(chunks[0], counts[0], microbatches, buffers, context, optimizer, filled=filled)
    layers = [cost for chunk in chunks for cost in chunk]
    moments = [updating_memory(layers, microbatches, buffers, context)] if optimizer else []
    # equal chunks are one object
    idle = {id(chunk): _idle_chunk(chunk, microbatches) for chunk in chunks}
    running: dict[tuple[int, int], MemoryBreakdown] = {}
    for number, counts in held:
        key = id(chunks[number]), max(counts[number], 1)
        if key not in running:
            running[key] = stage_memory(chunks[number], key[1], microbatches, buffers, context, optimizer=False)
        others = [(idle[id(chunk)], counts[other]) for other, chunk in enumerate(chunks) if other != number]
        moments.append(_with_idle_chunks(running[key], others))
    return max(moments, key=lambda memory: memory.total)


@dataclass(frozen=True, slots=True)
class _IdleChunk:
    """Bytes of a virtual stage that does not compute; ``gathered`` and ``kept`` count for micro-batches in flight."""

    parameters: int
    gathered: int
    gradients: int
    states: int
    kept: int


def _idle_chunk(chunk: Sequence[LayerCost], microbatches: int) -> _IdleChunk:
    return _IdleChunk(
        sum(cost.parameters + cost.weight_copies for cost in chunk),
        sum(cost.gathered for cost in chunk),
        sum(gradients_of(cost, microbatches) for cost in chunk),
        sum(cost.states for cost in chunk),
        sum(cost.kept for cost in chunk),
    )


def _with_idle_chunks(memory: MemoryBreakdown, idle: Sequence[tuple[_IdleChunk, int]]) -> MemoryBreakdown:
    """Add the other virtual stages of the devices, each with a number of micro-batches in flight."""
    return replace(
        memory,
        parameters=memory.parameters + sum(chunk.parameters + chunk.gathered * (count > 0) for chunk, count in idle),
        gradients=memory.gradients + sum(chunk.gradients for chunk, _ in idle),
        optimizer=memory.optimizer + sum(chunk.states for chunk, _ in idle),
        activations=memory.activations + sum(count * chunk.kept for chunk, count in idle),
    )


def reserved(memory: MemoryBreakdown, capacity: int, buffers: int = 0) -> int:
    """Return the bytes that the driver (``nvidia-smi``) shows as used at the peak.

    PyTorch's caching allocator keeps freed blocks that no later tensor fits into. Guo et al. 2024 (GMLake,
    arXiv 2401.08156, abstract) find that training of language models loses 15 % of memory to that on average. The
    allocator returns them before it fails, so that it never reserves more than the device has.

    Args:
        memory: predicted at the peak; ``context`` included once.
        capacity: bytes of the device.
        buffers: bytes of gradient buffers that are allocated once, with no gaps between them.
    """
    tensors = memory.total - memory.context - buffers
    return max(memory.total, min(round(tensors / (1.0 - UNUSED_SHARE)) + buffers + memory.context, capacity))
