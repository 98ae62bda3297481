"""Layers in a row, made into a ``ModelGraph``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph, Passed, Role, Tie


def blocks(prefix: str, kind: str, count: int) -> list[Layer]:
    """So many equal blocks, named ``prefix.0``, ``prefix.1``, ..."""
    return [Layer(f"{prefix}.{index}", kind, Role.BLOCK) for index in range(count)]


def assemble(
    name: str,
    kinds: Sequence[LayerKind],
    middle: Sequence[Layer],
    *,
    sequence: int,
    precision: str,
    ties: Mapping[tuple[str, str], int] | None = None,
    notes: tuple[str, ...] = (),
    tensors: Sequence[Passed] = (),
) -> ModelGraph:
    """The graph of ``before``, the layers in the middle, ``after``."""
    layers = (Layer("before", "before", Role.BEFORE), *middle, Layer("after", "after", Role.AFTER))
    shared = tuple(Tie(first, second, items) for (first, second), items in (ties or {}).items())
    return ModelGraph(
        name=name,
        layers=layers,
        kinds={kind.name: kind for kind in kinds},
        sequence=sequence,
        precision=precision,
        ties=shared,
        source="shapes",
        notes=notes,
        tensors=tuple(tensors),
    )


def chained(names: Sequence[str], size: int) -> list[Passed]:
    """A tensor of so many bytes per sample from each layer to the next."""
    return [Passed(left, (right,), size) for left, right in pairwise(names)]


def with_skips(graph: ModelGraph, skips: Sequence[Passed]) -> ModelGraph:
    """A chain with tensors that go further than to the next layer; those of the chain are the kinds' outputs."""
    if not skips:
        return graph
    chain = [
        Passed(left.name, (right.name,), graph.kind_of(left).output_bytes) for left, right in pairwise(graph.layers)
    ]
    place = {layer.name: number for number, layer in enumerate(graph.layers)}
    return replace(graph, tensors=tuple(sorted([*chain, *skips], key=lambda tensor: place[tensor.producer])))
