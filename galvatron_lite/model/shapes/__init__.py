"""Models named by a YAML file or by shape flags: shapes to ``ModelGraph`` by closed forms."""

from galvatron_lite.model.shapes.fields import (
    ConvNextShape,
    DecoderShape,
    EncoderDecoderShape,
    EncoderShape,
    MoeShape,
    ResNetShape,
    Shape,
    VitShape,
)
from galvatron_lite.model.shapes.registry import (
    build_graph,
    load_model,
    load_shape,
    model_names,
    shape_from_data,
    shape_from_flags,
)

__all__ = [
    "ConvNextShape",
    "DecoderShape",
    "EncoderDecoderShape",
    "EncoderShape",
    "MoeShape",
    "ResNetShape",
    "Shape",
    "VitShape",
    "build_graph",
    "load_model",
    "load_shape",
    "model_names",
    "shape_from_data",
    "shape_from_flags",
]
