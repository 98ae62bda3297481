"""Layers in a row, made into a ``ModelGraph``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph, Role, Tie


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
) -> ModelGraph:
    """The graph of a chain: ``before``, the layers in the middle, ``after``.

    Args:
        name: of the model.
        kinds: of all layers, ``before`` and ``after`` among them.
        middle: layers between them, in the order they run.
        sequence: tokens per sample.
        precision: of activations.
        ties: items shared by (owner, user).
        notes: for the reader.
    """
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
    )
