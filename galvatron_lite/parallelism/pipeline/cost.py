"""Pipeline parallelism: stages send the boundary tensor forward and its gradient back.

Not a choice of a single layer, so no ``Dimension``; ``cost`` and ``search`` use these functions instead.
"""

from __future__ import annotations

from functools import lru_cache

from galvatron_lite.arrays import Real, Whole, largest, least
from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.model.graph import LayerKind, OperatorClass
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.pipeline.schedule import Moments, Schedule
from galvatron_lite.parallelism.strategy import Strategy

NAME = "pipeline"


def boundary_bytes(output_bytes: int, microbatch: int, sender: Strategy) -> int:
    """Bytes of the boundary tensor that one device of the sending stage holds, for one micro-batch.

    Args:
        output_bytes: bytes per sample of the last layer's output.
        microbatch: samples of one micro-batch over the whole stage.
        sender: strategy of the last layer of the sending stage.
    """
    tokens = sender.context * (sender.tensor if sender.sequence_parallel else 1)
    return -(-output_bytes * microbatch // (sender.batch_degree * tokens * sender.spatial * sender.channels))


def transfer(size: int, stage_devices: int, stride: int | None = None) -> Communication:
    """One device's send to the device of equal place in another stage, while all its neighbours do the same.

    Args:
        size: bytes.
        stage_devices: devices of one stage.
        stride: ranks between the two, see ``stride_between``; None: neighbouring groups.
    """
    group = RankGroup(2, stride or stage_devices, stage_devices)
    return Communication(Collective.SEND_RECV, size, group, Moment.FORWARD, overlaps=False, cause=NAME)


def stride_between(first: int, second: int, stage_devices: int, node_devices: int) -> int:
    """The stride that says which links lie between two groups of devices: at least a node where they are in two."""
    nodes = [group * stage_devices // node_devices for group in (first, second)]
    return stage_devices if nodes[0] == nodes[1] else max(stage_devices, node_devices)


def fills(schedule: Schedule, held: int, microbatches: int) -> bool:
    """Whether a group of one stage holds so many micro-batches only before its first backward, which makes gradients of
    weights: all of a step, of several (GPipe; 1F1B where as many stages follow). Zero-bubble: the pass that comes first
    makes none, but leaves memory for the one that does.
    """
    return schedule.simple and held == microbatches > 1


@lru_cache(maxsize=4096)
def chunks_in_flight(schedule: Schedule, pipeline: int, group: int, microbatches: int, virtual: int) -> Moments:
    """See ``Schedule.moments``."""
    return schedule.moments(pipeline, group, microbatches, virtual)


def buffer_bytes(left: Whole, right: Whole, microbatches: int, schedule: Schedule, *, counted: bool = True) -> Whole:
    """Bytes of send and receive buffers of one stage, beyond what its layers keep.

    Coming in: one activation received ahead of its pass and one gradient on its way back (``left`` bytes each, 0 in
    the first stage). Going out: one activation under way and one gradient received (``right``, 0 in the last). The
    inputs of micro-batches in flight are part of what the first layer keeps. With one micro-batch a step nothing comes
    ahead: what was sent on is there until the step ends, and the gradient received as long as the backward pass (where
    that is split, it is among what passes of weights wait with). None where the profile counts no buffers.
    """
    ahead, behind = held_messages(microbatches, schedule)
    return (left * ahead + right * behind) * counted


def held_messages(microbatches: int, schedule: Schedule) -> tuple[int, int]:
    """Messages over the boundaries before and behind a stage that ``buffer_bytes`` counts."""
    return (2, 2) if microbatches > 1 else (0, 1 if schedule.splits_backward else 2)


def weight_seconds(forward: Real, backward: Real) -> Real:
    """Seconds of the gradients of weights of a layer, from its compute (``backward`` without recomputation).

    Every matmul with weights runs once in forward and twice in backward, all else about as long in both, so the
    weights' share is what backward takes longer (Qi et al. 2023, table 5: within 5 % of their measurements).
    """
    return least(largest(backward - forward, 0.0), forward)


def weight_products(kind: LayerKind) -> int:
    """How many products with weights a layer makes whose gradients a zero-bubble schedule leaves to a pass of their
    own."""
    return sum(
        operator.count
        for operator in kind.operators
        if operator.kind in _PRODUCTS and operator.weight_bytes and not operator.frozen
    )


_PRODUCTS = frozenset({OperatorClass.MATMUL, OperatorClass.CONVOLUTION})
