"""Channels that become pixels, and pixels that become channels, in pictures whose pixels ranks share."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from galvatron_lite.parallelism.cuts.calls import argument, fronted
from galvatron_lite.parallelism.cuts.tensor import Call, Cut, Handler, cut_tensor, cuts_of, local_of

UNEVEN = "gathers pictures of this size by design, as ranks have not as many pixels each"
"""Said where shares of the picture, or of the result, differ in length."""
SIDES = 2
"""A picture's last dims are its sides; its channels come before."""


def pixel_shuffle(call: Call) -> Any:
    """Each pixel becomes a square: a cut picture where all ranks hold as many pixels; else it is gathered."""
    return _shuffled(call, Fraction(argument(fronted(call), 1, "upscale_factor")))


def pixel_unshuffle(call: Call) -> Any:
    """Each square becomes a pixel: a cut picture where all ranks hold as many squares; else it is gathered."""
    return _shuffled(call, Fraction(1, argument(fronted(call), 1, "downscale_factor")))


def _shuffled(call: Call, growth: Fraction) -> Any:
    """``growth``: extents of the result for those of the picture."""
    given = fronted(call)
    picture = given.args[0]
    share, cuts = local_of(picture), cuts_of(picture)
    grown = [cut.extent * growth for cut in cuts]
    even = all(cut.extent % cut.line.size == 0 for cut in cuts)
    square = all((extent / cut.line.size).denominator == 1 for extent, cut in zip(grown, cuts, strict=True))
    if cuts[0].dim < share.dim() - SIDES:
        return call.rules.otherwise(call)
    if not (even and square):
        return call.rules.otherwise(call._replace(because=UNEVEN))
    after = [Cut(cut.dim, int(extent), cut.line) for cut, extent in zip(cuts, grown, strict=True)]
    return cut_tensor(call.function(share, *given.args[1:], **given.kwargs), after, call.rules)


HANDLERS: Mapping[str, Handler] = {"pixel_shuffle": pixel_shuffle, "pixel_unshuffle": pixel_unshuffle}
"""Shuffles of pixels and channels."""
