"""The dimensions there are. ``cost`` and ``search`` iterate over these and know none of them by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
"""In the order they are applied: what slices the layer first, what wraps the slices later."""
_CHOSEN: tuple[Dimension, ...] = (
    _TENSOR, _CONTEXT, _EXPERT, *_CHANNELS, *_PIXELS, _DATA, _ZERO, _OFFLOAD, _RECOMPUTE,
)  # fmt: skip
"""In the order they are chosen: what a later one may choose depends on the earlier ones."""
_PINNED: tuple[Dimension, ...] = (
    _DATA, _ZERO, _TENSOR, _CONTEXT, _EXPERT, _SPATIAL, _CHANNEL, _RECOMPUTE, _OFFLOAD,
)  # fmt: skip
_WRITTEN: tuple[Dimension, ...] = (
    _DATA, _ZERO, _CONTEXT, _EXPERT, _TENSOR, _SPATIAL, _CHANNEL, _RECOMPUTE, _OFFLOAD,
)  # fmt: skip
"""In the order of the words of a strategy."""
UNSPLIT, FORMER = "unsplit", "whole"
"""The word of a strategy that splits nothing, now and in older plan files."""
_ADDED: list[Dimension] = []
"""Dimensions that split samples besides data and ZeRO, the outermost ranks first."""


def dimensions() -> tuple[Dimension, ...]:
    """Every dimension, in the order they are applied: what slices the layer first, what wraps the slices later."""
    return (*_DIMENSIONS, *_ADDED)


def run_fields() -> tuple[str, ...]:
    """Fields of ``Strategy`` on which it depends what one device runs of a layer; those last for whose values others
    stand in."""
    return tuple(name for one in sorted(_DIMENSIONS, key=lambda one: one.stands_in) for name in one.runs)


def work_on(kind: LayerKind, strategy: Either, microbatch: Whole, context: DimensionContext) -> LayerWork:
    """What one device does and holds for a layer of a kind under a strategy, or many.

    Args:
        kind: of the layer.
        strategy: takes all devices of the stage.
        microbatch: samples of one micro-batch over the stage.
        context: what else dimensions look at.
    """
    items, trained = float(kind.parameters.total), float(kind.trainable)
    frozen = items - trained
    work = LayerWork(1.0 * microbatch, 1, False, Recompute.NONE, items, trained, items, trained, frozen_items=frozen)
    for dimension in dimensions():
        work = dimension.apply(work, kind, strategy, context)
    return work


def choosing() -> tuple[Dimension, ...]:
    """Every dimension by degree, in the order they are chosen: what a later one may choose depends on earlier ones."""
    return (*_ADDED, *_CHOSEN)


def pinned() -> tuple[Dimension, ...]:
    """Every dimension once, in the order that ``--fix`` and ``--forbid`` name them."""
    return (*_PINNED, *_ADDED)


def short_name(strategy: Strategy) -> str:
    """``data4 zero3x2 tensor2+sp recompute``; ``unsplit`` where nothing is split."""
    return " ".join(filter(None, (one.word(strategy) for one in (*_ADDED, *_WRITTEN)))) or UNSPLIT


def in_words(strategy: Strategy) -> str:
    """The same in a report."""
    return "; ".join(filter(None, (one.in_words(strategy) for one in (*_ADDED, *_WRITTEN)))) or "nothing is split"


def fields_in(word: str) -> dict[str, object] | None:
    """The fields that a word of a short name sets: the inverse of ``short_name``; None for words that say nothing."""
    if word in (UNSPLIT, FORMER):
        return {}
    readings = (one.read(word) for one in pinned())
    return next((fields for fields in readings if fields is not None), None)


def parts_of() -> dict[str, tuple[str, ...]]:
    """What can be forbidden of all dimensions, and the fields of ``Strategy`` that each sets."""
    return {
        part: fields
        for one in pinned()
        for part, fields in (one.parts or {one.name: (one.degree or one.name,)}).items()
    }


def added_dimensions() -> tuple[Dimension, ...]:
    """Those that are none of the fields of ``Strategy``."""
    return tuple(_ADDED)


def added_degrees(strategy: Strategy) -> list[tuple[Dimension, int]]:
    """Those of them that a strategy uses, with their degrees."""
    return [(one, degree) for one in _ADDED for name, degree in strategy.more if name == one.name]


def add(dimension: Dimension) -> Dimension:
    """Make a dimension that splits samples one that plans may use and the search may choose.

    Its degree is read by ``getattr(strategy, name)``. Its ranks lie outside of all others, hold the same states and sum
    their gradients with the data-parallel ranks.

    Raises:
        InputError: another one, or a field of ``Strategy``, has its name; or its one axis does not split samples.
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
    """The same for as long as a block lasts."""
    add(dimension)
    try:
        yield dimension
    finally:
        ADDED.remove(dimension.name)
        _ADDED.remove(dimension)


REFUSING: tuple[Dimension, ...] = (*_CHANNELS, *_PIXELS)
"""Those that tell why a layer cannot be split."""

_WHOLE: dict[str, object] = {
    "context": 1, "depth": 1, "height": 1, "width": 1, "filters": 1, "channels": 1,
}  # fmt: skip
_REPLICAS: dict[str, object] = {"zero": 1, "zero_stage": 0}
_ONE_COPY: dict[str, object] = {"data": 1, **_REPLICAS, "tensor": 1, "context": 1}

SHAPES: tuple[tuple[str, dict[str, object]], ...] = (
    ("plain data parallel", {**_WHOLE, **_REPLICAS, "tensor": 1}),
    ("ZeRO-2", {**_WHOLE, "data": 1, "zero_stage": 2, "tensor": 1}),
    ("ZeRO-3", {**_WHOLE, "data": 1, "zero_stage": 3, "tensor": 1}),
    ("tensor parallel", {**_WHOLE, **_REPLICAS, "data": 1}),
    ("spatial", {**_ONE_COPY, "filters": 1, "channels": 1}),
    ("filters", {**_ONE_COPY, "depth": 1, "height": 1, "width": 1, "channels": 1}),
)
"""Well-known plans to compare with, as the fields of ``Strategy`` they pin (where devices are more than one)."""

SPREADING: tuple[tuple[str, str], ...] = (("experts", "expert"), ("context", "context"))
"""Well-known plans of layers that can spread what others have not: the name, and the degree of ``Strategy``."""
