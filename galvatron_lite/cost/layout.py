"""How the boundary tensors of a layer lie on the devices of a stage, and which devices exchange them."""

from __future__ import annotations

import numpy as np

from galvatron_lite.arrays import IntArray
from galvatron_lite.parallelism.base import Strategy, Strided

Layout = tuple[int, int, int, bool, bool]
"""How boundary tensors lie on a stage's devices: batch, context and tensor degree, whether the parts of a sample lie
far apart (strided) with those of other samples between them, and whether tensor groups share tokens."""


def layout(strategy: Strategy) -> Layout:
    """How a strategy's boundary tensors lie.

    Strided ZeRO ranks change nothing: which samples a rank of data x zero takes is free, so they go by its place.
    """
    batch, context = strategy.batch_degree, strategy.context
    far = strategy.strided is Strided.CONTEXT and context > 1 and batch > 1
    return batch, context, strategy.tensor, far, strategy.sequence_parallel


def of_layout(own: Layout) -> Strategy:
    """A strategy of a layout."""
    data, context, tensor, far, shared = own
    strided = Strided.CONTEXT if far else Strided.NONE
    return Strategy(data=data, context=context, tensor=tensor, sequence_parallel=shared, strided=strided)


def exchanging(left: IntArray, right: IntArray) -> IntArray:
    """Consecutive devices within which layouts differ: 1 where they are the same.

    Layouts (b, c, t) and (b', c', t') put the samples in order on runs of lcm(c t, c' t') devices; where both are far
    and c = c', each part of the samples lies on runs of lcm(t, t'). All devices else.

    Args:
        left: (..., 5) layouts, those of ``right`` broadcast against it.
        right: the same.
    """
    (batch, context, tensor, far, _), (_, context2, tensor2, far2, _) = (
        np.moveaxis(left, -1, 0),
        np.moveaxis(right, -1, 0),
    )
    near = np.lcm(context * tensor, context2 * tensor2)
    inside = np.where(context == context2, np.lcm(tensor, tensor2), batch * context * tensor)
    differ = np.where(far != far2, batch * context * tensor, np.where(far == 1, inside, near))
    size: IntArray = np.where((left == right).all(axis=-1), 1, differ)
    return size
