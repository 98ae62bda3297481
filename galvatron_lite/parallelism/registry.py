"""The dimensions there are. ``cost`` and ``search`` iterate over these and know none of them by name."""

from __future__ import annotations

from galvatron_lite.parallelism.base import Dimension, Refusing
from galvatron_lite.parallelism.channel.cost import ChannelDimension
from galvatron_lite.parallelism.context.cost import ContextDimension
from galvatron_lite.parallelism.data.cost import DataDimension
from galvatron_lite.parallelism.expert.cost import ExpertDimension
from galvatron_lite.parallelism.offload.cost import OffloadDimension
from galvatron_lite.parallelism.placement.cost import PlacementDimension
from galvatron_lite.parallelism.recompute.cost import RecomputeDimension
from galvatron_lite.parallelism.spatial.cost import SpatialDimension
from galvatron_lite.parallelism.tensor.cost import TensorDimension
from galvatron_lite.parallelism.zero.cost import ZeroDimension

DIMENSIONS: tuple[Dimension, ...] = (
    TensorDimension(),
    ChannelDimension(),
    SpatialDimension(),
    ContextDimension(),
    ExpertDimension(),
    RecomputeDimension(),
    ZeroDimension(),
    DataDimension(),
    OffloadDimension(),
)
"""In the order they are applied: what slices the layer first, what wraps the slices later."""

_CHANNELS = (ChannelDimension(), ChannelDimension(degree="channels"))
_PIXELS = (SpatialDimension(degree="depth"), SpatialDimension(degree="height"), SpatialDimension(degree="width"))

CHOSEN: tuple[Dimension, ...] = (
    TensorDimension(),
    ContextDimension(),
    ExpertDimension(),
    *_CHANNELS,
    *_PIXELS,
    DataDimension(),
    ZeroDimension(),
    PlacementDimension(),
    OffloadDimension(),
    RecomputeDimension(),
)
"""In the order they are chosen: what a later one may choose depends on the earlier ones."""

REFUSING: tuple[Refusing, ...] = (*_CHANNELS, *_PIXELS)
"""Those that tell why a layer cannot be split."""

SHAPES: tuple[tuple[str, dict[str, object]], ...] = (
    ("plain data parallel", {"zero": 1, "zero_stage": 0, "tensor": 1, "context": 1}),
    ("ZeRO-2", {"data": 1, "zero_stage": 2, "tensor": 1, "context": 1}),
    ("ZeRO-3", {"data": 1, "zero_stage": 3, "tensor": 1, "context": 1}),
    ("tensor parallel", {"data": 1, "zero": 1, "zero_stage": 0, "context": 1}),
)
"""Well-known plans to compare with, as the fields of ``Strategy`` they pin (where devices are more than one)."""
