"""Shared channels as software does it that brings pictures together behind every convolution. No torch here.

ChainerMN's way (Kahira et al. 2021, arXiv:2104.09075, section 4; chainermn/functions/collective_communication.py,
whose all-gather's gradient is an all-to-all and a sum). Only dense convolutions are split; all else works on whole
pictures, on every device. Of a picture x that enters a convolution and y that leaves it:

                forward           backward
    filters     all-gather of y   reduce-scatter of y's gradient
    channels    all-reduce of y   all-gather of x's gradient
"""

from __future__ import annotations

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass
from galvatron_lite.parallelism.base import Moment
from galvatron_lite.parallelism.channel.parts import OperatorPart, Parts, takes_gradient
from galvatron_lite.parallelism.pictures import channels_of, is_picture, items_of


def each_parts(operators: tuple[Operator, ...], by: str) -> Parts:
    """What a device does of each operator; input channels of an image are not shared.

    Args:
        operators: of a layer.
        by: ``filters`` or ``channels``.
    """
    split = OperatorPart.GATHERED if by == "filters" else OperatorPart.CHANNELS
    return tuple((one, split if _is_split(one, by) else OperatorPart.WHOLE) for one in operators)


def _is_split(one: Operator, by: str) -> bool:
    dense = one.kind is OperatorClass.CONVOLUTION and channels_of(one)[2] == 1
    return dense and (by == "filters" or takes_gradient(one))


def each_divides(kind: LayerKind, by: str, degree: int) -> bool:
    """Whether a layer of pictures can be run so: what is split is split evenly; where nothing is, all do the same."""
    place = 1 if by == "filters" else 0
    split = [one for one, part in each_parts(kind.operators, by) if part is not OperatorPart.WHOLE]
    return is_picture(kind) and all(channels_of(one)[place] % degree == 0 for one in split)


def each_sizes(kind: LayerKind, by: str) -> tuple[tuple[Collective, Moment, list[int]], ...]:
    """Collectives of a layer, when they happen, and the items a sample of each call."""
    split = [one for one, part in each_parts(kind.operators, by) if part is not OperatorPart.WHOLE]
    leaving = [items_of(one)[1] for one in split]
    if by == "filters":
        back = [items_of(one)[1] for one in split if takes_gradient(one)]
        return (Collective.ALL_GATHER, Moment.FORWARD, leaving), (Collective.REDUCE_SCATTER, Moment.BACKWARD, back)
    entering = [items_of(one)[0] for one in split]
    return (Collective.ALL_REDUCE, Moment.FORWARD, leaving), (Collective.ALL_GATHER, Moment.BACKWARD, entering)
