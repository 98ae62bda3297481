"""The handlers of everything that is neither a convolution's window nor a norm: for any dims that are cut."""

from __future__ import annotations

from collections.abc import Mapping

from galvatron_lite.parallelism.cuts import (
    along,
    asking,
    contractions,
    extremes,
    gradients,
    indexing,
    joining,
    losses,
    pointwise,
    randomness,
    reductions,
    spread,
    views,
)
from galvatron_lite.parallelism.cuts.tensor import Handler

SHARED: Mapping[str, Handler] = {
    **asking.HANDLERS,
    **gradients.HANDLERS,
    **pointwise.HANDLERS,
    **randomness.HANDLERS,
    **views.HANDLERS,
    **along.HANDLERS,
    **indexing.HANDLERS,
    **joining.HANDLERS,
    **reductions.HANDLERS,
    **spread.HANDLERS,
    **extremes.HANDLERS,
    **contractions.HANDLERS,
    **losses.HANDLERS,
}
"""By the function's name; tables of one way to split are added to it."""
