"""A network's graph with its pictures channels last in memory."""

from __future__ import annotations

from dataclasses import replace

from galvatron_lite.model.graph import LayerKind, ModelGraph, Operator, OperatorClass


def channels_last(graph: ModelGraph) -> ModelGraph:
    """The same graph, every convolution of which reads and writes pictures channels last (NHWC)."""
    return replace(graph, kinds={name: _turned(kind) for name, kind in graph.kinds.items()})


def _turned(kind: LayerKind) -> LayerKind:
    return replace(kind, operators=tuple(_operator(operator) for operator in kind.operators))


def _operator(operator: Operator) -> Operator:
    return replace(operator, channels_last=True) if operator.kind is OperatorClass.CONVOLUTION else operator
