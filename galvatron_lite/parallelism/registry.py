"""The registry of dimensions. ``cost`` and ``search`` iterate over it and name none of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from galvatron_lite.arrays import Whole
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, Recompute
from galvatron_lite.parallelism.axes import MeshAxis, Part
from galvatron_lite.parallelism.base import Dimension, DimensionContext, LayerWork
from galvatron_lite.parallelism.channel.cost import ChannelDimension
from galvatron_lite.parallelism.context.cost import ContextDimension
from galvatron_lite.parallelism.data.cost import DataDimension
from galvatron_lite.parallelism.expert.cost import ExpertDimension
from galvatron_lite.parallelism.offload.cost import OffloadDimension
from galvatron_lite.parallelism.ranks import Either
from galvatron_lite.parallelism.recompute.cost import RecomputeDimension
from galvatron_lite.parallelism.spatial.cost import SpatialDimension
from galvatron_lite.parallelism.strategy import ADDED, Strategy
from galvatron_lite.parallelism.tensor.cost import TensorDimension
from galvatron_lite.parallelism.zero.cost import ZeroDimension

_TENSOR, _CHANNEL, _SPATIAL, _CONTEXT = TensorDimension(), ChannelDimension(), SpatialDimension(), ContextDimension()
_EXPERT, _RECOMPUTE, _ZERO, _DATA = ExpertDimension(), RecomputeDimension(), ZeroDimension(), DataDimension()
_OFFLOAD = OffloadDimension()
_CHANNELS = (_CHANNEL, ChannelDimension(degree="channels"))
_PIXELS = (SpatialDimension(degree="depth"), SpatialDimension(degree="height"), SpatialDimension(degree="width"))

_DIMENSIONS: tuple[Dimension, ...] = (
    _TENSOR, _CHANNEL, _SPATIAL, _CONTEXT, _EXPERT, _RECOMPUTE, _ZERO, _DATA, _OFFLOAD,
)  # fmt: skip
"""In the order of ``apply``: first what slices a layer, then what wraps the slices."""
_CHOSEN: tuple[Dimension, ...] = (
    _TENSOR, _CONTEXT, _EXPERT, *_CHANNELS, *_PIXELS, _DATA, _ZERO, _OFFLOAD, _RECOMPUTE,
)  # fmt: skip
"""In the order of ``allows``: the choices of each may depend on those before it."""
_PINNED: tuple[Dimension, ...] = (
    _DATA, _ZERO, _TENSOR, _CONTEXT, _EXPERT, _SPATIAL, _CHANNEL, _RECOMPUTE, _OFFLOAD,
)  # fmt: skip
_WRITTEN: tuple[Dimension, ...] = (
    _DATA, _ZERO, _CONTEXT, _EXPERT, _TENSOR, _SPATIAL, _CHANNEL, _RECOMPUTE, _OFFLOAD,
)  # fmt: skip
"""In the order of the words of a strategy's short name."""
UNSPLIT, FORMER = "unsplit", "whole"
"""Short name of a strategy that splits nothing, now and in older plan files."""
_ADDED: list[Dimension] = []
"""Dimensions that ``add`` registered, the outermost ranks first."""


def dimensions() -> tuple[Dimension, ...]:
    """List all dimensions in the order of ``apply``: first what slices a layer, then what wraps the slices."""
    return (*_DIMENSIONS, *_ADDED)


def run_fields() -> tuple[str, ...]:
    """List the fields of ``Strategy`` that change what one device runs of a layer.

    Those of dimensions for which figures of the unsplit layer stand in come last.
    """
    ordered = sorted(_DIMENSIONS, key=lambda dimension: dimension.stands_in)
    return tuple(name for dimension in ordered for name in dimension.runs)


def work_on(kind: LayerKind, strategy: Either, microbatch: Whole, context: DimensionContext) -> LayerWork:
    """Compute what one device does and holds for a layer under a strategy, or under many.

    Args:
        kind: of the layer.
        strategy: uses all devices of the stage.
        microbatch: samples of one micro-batch in the stage.
        context: what else dimensions depend on.
    """
    items, trained = float(kind.parameters.total), float(kind.trainable)
    frozen = items - trained
    work = LayerWork(1.0 * microbatch, 1, False, Recompute.NONE, items, trained, items, trained, frozen_items=frozen)
    for dimension in dimensions():
        work = dimension.apply(work, kind, strategy, context)
    return work


def choosing() -> tuple[Dimension, ...]:
    """List the dimensions in the order of ``allows``, once for each degree that is chosen by itself."""
    return (*_ADDED, *_CHOSEN)


def pinned() -> tuple[Dimension, ...]:
    """List the dimensions in the order in which ``--fix`` and ``--forbid`` name them."""
    return (*_PINNED, *_ADDED)


@lru_cache(maxsize=4096)
def complexity(strategy: Strategy) -> int:
    """Return how many simpler strategies there are of the same ranks and samples (lower ZeRO stages)."""
    return sum(len(dimension.simplified(strategy)) for dimension in choosing())


def short_name(strategy: Strategy) -> str:
    """Return a short name such as ``data4 zero3x2 tensor2+sp recompute``, or ``unsplit``."""
    return " ".join(filter(None, (dimension.word(strategy) for dimension in (*_ADDED, *_WRITTEN)))) or UNSPLIT


def in_words(strategy: Strategy) -> str:
    """Describe a strategy in a report."""
    words = (dimension.in_words(strategy) for dimension in (*_ADDED, *_WRITTEN))
    return "; ".join(filter(None, words)) or "nothing is split"


def fields_in(word: str) -> dict[str, object] | None:
    """Return the fields that a word of a short name sets; None if it is not such a word."""
    if word in (UNSPLIT, FORMER):
        return {}
    readings = (dimension.read(word) for dimension in pinned())
    return next((fields for fields in readings if fields is not None), None)


def parts_of() -> dict[str, tuple[str, ...]]:
    """Return the parts of all dimensions that can be forbidden, and the fields of ``Strategy`` that each sets."""
    return {
        part: fields
        for dimension in pinned()
        for part, fields in (dimension.parts or {dimension.name: (dimension.degree or dimension.name,)}).items()
    }


def added_dimensions() -> tuple[Dimension, ...]:
    """List the dimensions that ``add`` registered."""
    return tuple(_ADDED)


def added_degrees(strategy: Strategy) -> list[tuple[Dimension, int]]:
    """List the added dimensions that a strategy uses, with their degrees."""
    return [(dimension, degree) for dimension in _ADDED for name, degree in strategy.more if name == dimension.name]


def add(dimension: Dimension) -> Dimension:
    """Register a dimension that splits samples, for plans and the search to use.

    ``getattr(strategy, name)`` reads its degree. Its ranks are the outermost, hold the same states and reduce their
    gradients with the data-parallel ranks.

    Raises:
        InputError: a dimension or a field of ``Strategy`` has its name, or it does not split samples along one axis.
    """
    if not dimension.name.isidentifier() or hasattr(Strategy(), dimension.name) or dimension.degree != dimension.name:
        raise InputError("dimension", dimension.name, "Give a name that no dimension has, and the same as its degree.")
    if dimension.axes != (MeshAxis(dimension.name, Part.SAMPLES, replicates=True),):
        raise InputError("dimension", dimension.name, "Give one axis of its name, of samples, that replicates states.")
    ADDED.append(dimension.name)
    _ADDED.append(dimension)
    return dimension


@contextmanager
def added(dimension: Dimension) -> Iterator[Dimension]:
    """Register a dimension within a ``with`` block; see ``add``."""
    add(dimension)
    try:
        yield dimension
    finally:
        ADDED.remove(dimension.name)
        _ADDED.remove(dimension)


REFUSING: tuple[Dimension, ...] = (*_CHANNELS, *_PIXELS)
"""Dimensions that explain in an error why a layer cannot be split (``refusal``)."""

_FULL_SAMPLES: dict[str, object] = {
    "context": 1, "depth": 1, "height": 1, "width": 1, "filters": 1, "channels": 1,
}  # fmt: skip
_FULL_STATES: dict[str, object] = {"zero": 1, "zero_stage": 0}
_ONE_COPY: dict[str, object] = {"data": 1, **_FULL_STATES, "tensor": 1, "context": 1}

SHAPES: tuple[tuple[str, dict[str, object]], ...] = (
    ("plain data parallel", {**_FULL_SAMPLES, **_FULL_STATES, "tensor": 1}),
    ("ZeRO-2", {**_FULL_SAMPLES, "data": 1, "zero_stage": 2, "tensor": 1}),
    ("ZeRO-3", {**_FULL_SAMPLES, "data": 1, "zero_stage": 3, "tensor": 1}),
    ("tensor parallel", {**_FULL_SAMPLES, **_FULL_STATES, "data": 1}),
    ("spatial", {**_ONE_COPY, "filters": 1, "channels": 1}),
    ("filters", {**_ONE_COPY, "depth": 1, "height": 1, "width": 1, "channels": 1}),
)
"""Well-known plans to compare with on several devices, as the fields of ``Strategy`` that they pin."""

SPREADING: tuple[tuple[str, str], ...] = (("experts", "expert"), ("context", "context"))
"""Well-known plans of layers with experts or tokens to spread: the name, and the degree of ``Strategy``."""
