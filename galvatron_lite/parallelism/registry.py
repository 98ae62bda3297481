"""The dimensions there are. ``cost`` and ``search`` iterate over these and know none of them by name."""

from __future__ import annotations

from galvatron_lite.parallelism.base import Dimension
from galvatron_lite.parallelism.channel.cost import ChannelDimension
from galvatron_lite.parallelism.context.cost import ContextDimension
from galvatron_lite.parallelism.data.cost import DataDimension
from galvatron_lite.parallelism.expert.cost import ExpertDimension
from galvatron_lite.parallelism.offload.cost import OffloadDimension
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
    OffloadDimension(),
    RecomputeDimension(),
)
"""In the order they are chosen: what a later one may choose depends on the earlier ones."""

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
