"""The table of layers that the closed forms need, from any convolutional model of the planner. No torch here.

Operators with weights, pooling windows and what works element by element become layers in the order of the model's
layers. Seconds of a sample are estimated: the planner's own, on one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, ModelGraph, Operator, OperatorClass
from galvatron_lite.model.sides import sides_of
from galvatron_lite.oracle.layers import Network, Op, OracleLayer, Split
from galvatron_lite.parallelism.pictures import channels_of, is_picture

_ADDS = ("residual", "add", "concat")
_ELEMENTWISE = ("relu", "act", "gelu", "swish", "silu", "sigmoid")


def network_of(graph: ModelGraph, seconds: float, source: str, samples: int, batch: int) -> Network:
    """The table of a model.

    Args:
        graph: the model.
        seconds: of forward and backward of one sample.
        source: what ``seconds`` come from.
        samples: of an epoch.
        batch: samples of a replica.

    Raises:
        InputError: a model that is no convolutional network.
    """
    for kind in graph.kinds.values():
        if kind.dims.sequence > 1 or any(one.kind is OperatorClass.ATTENTION for one in kind.operators):
            remedy = "The closed forms are of convolutional networks; leave --formulas paradl out."
            raise InputError("model", graph.name, remedy)
    layers = tuple(
        one
        for layer in graph.layers
        for operator in graph.kind_of(layer).operators
        for one in _layers(layer.name, graph.kind_of(layer), operator)
    )
    return Network(
        graph.name, f"the planner's model of {graph.name}", samples, batch, seconds, "estimated", source, layers,
        graph=graph.name, item_bytes=2 if graph.precision in ("fp16", "bf16") else 4,
    )  # fmt: skip


def _layers(name: str, kind: LayerKind, one: Operator) -> Iterator[OracleLayer]:
    """As many layers as an operator has calls."""
    for number in range(max(one.count, 1)):
        suffix = f".{number}" if one.count > 1 else ""
        yield _layer(f"{name}.{one.name}{suffix}", kind, one)


def _layer(name: str, kind: LayerKind, one: Operator) -> OracleLayer:
    """One call of an operator."""
    if one.kind is OperatorClass.MATMUL:
        return _linear(name, kind, one)
    sides = sides_of(one)
    if not sides:
        return OracleLayer(name, _element_op(one), (one.shape[0],), (one.shape[0],))
    before, after = tuple(side.extent for side in sides), tuple(side.output for side in sides)
    kernel = tuple(side.kernel for side in sides)
    shared = (Split.SPATIAL,) if prod(before) > 1 else ()
    if one.kind is not OperatorClass.CONVOLUTION:
        channels = one.shape[1]
        return OracleLayer(name, Op.POOL, (channels, *before), (channels, *after), kernel, shared)
    inputs, outputs, groups = channels_of(one)
    return OracleLayer(
        name, Op.CONV, (inputs, *before), (outputs, *after), kernel, (Split.FILTER, *shared), groups
    )  # fmt: skip


def _linear(name: str, kind: LayerKind, one: Operator) -> OracleLayer:
    """A matmul over every pixel is a convolution of one pixel's window; over one row it is fully connected."""
    rows, inner, columns = one.shape
    if rows > 1 and is_picture(kind) and one.weight_bytes:
        return OracleLayer(name, Op.CONV, (inner, rows), (columns, rows), (1,), (Split.FILTER, Split.SPATIAL))
    return OracleLayer(name, Op.FC, (inner, rows), (columns, rows), (1,))


def _element_op(one: Operator) -> Op:
    if one.weight_bytes:
        return Op.NORM
    last = one.name.rsplit(".", 1)[-1]
    if any(word in last for word in _ADDS):
        return Op.ADD
    return Op.RELU if any(word in last for word in _ELEMENTWISE) else Op.OTHER
