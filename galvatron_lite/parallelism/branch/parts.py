"""A model in parts: some of its layers as a graph of their own, and those outside of branches. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from galvatron_lite.model.graph import Layer, ModelGraph, Passed
from galvatron_lite.parallelism.branch.find import Branch


def part_of(graph: ModelGraph, layers: Collection[str]) -> ModelGraph:
    """Some layers of a graph, with what goes between them and what they share.

    Layers that read nothing of each other stay apart: an empty tensor between them says that they are no chain.
    """
    own = tuple(layer for layer in graph.layers if layer.name in layers)
    tensors = tuple(
        replace(tensor, readers=readers)
        for tensor in graph.tensors
        if tensor.producer in layers and (readers := tuple(name for name in tensor.readers if name in layers))
    )
    if not tensors and len(own) > 1 and graph.tensors:
        tensors = (Passed(own[0].name, (own[-1].name,), 0),)
    ties = tuple(tie for tie in graph.ties if {tie.first, tie.second} <= set(layers))
    kinds = {layer.kind: graph.kinds[layer.kind] for layer in own}
    return replace(graph, layers=own, kinds=kinds, tensors=tensors, ties=ties)


def trunk_of(graph: ModelGraph, placed: Sequence[Branch]) -> tuple[Layer, ...]:
    """The layers outside the branches that are placed."""
    apart = {layer for branch in placed for layer in branch.layers}
    return tuple(layer for layer in graph.layers if layer.name not in apart)
