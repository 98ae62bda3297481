"""What the plan does with every layer: its stage, its strategy and its layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import LayerRun, Plan
from galvatron_lite.runtime.activations.layout import ActivationLayout


@dataclass(frozen=True, slots=True)
class LayerAssignment:
    """A layer and what the plan does with it."""

    layer: Layer
    strategy: Strategy

    @property
    def layout(self) -> ActivationLayout:
        """How the activations lie that the layer takes and returns. Edges hold all tokens of their samples."""
        layout = ActivationLayout.of(self.strategy)
        return layout if self.layer.role is Role.BLOCK else layout.replicated("sequence")


Stages = tuple[tuple[LayerAssignment, ...], ...]


def place_layers(plan: Plan, layers: Sequence[Layer]) -> Stages:
    """Every layer of the model with its strategy, by stage.

    Raises:
        InputError: the plan names a layer the model does not have, leaves one out, or takes them in another order.
    """
    names = [layer.name for layer in layers]
    stages, start = list[tuple[LayerAssignment, ...]](), 0
    for number, stage in enumerate(plan.stages):
        placed: list[LayerAssignment] = []
        for run in stage.runs:
            chosen = _layers_of(run, layers, names, start, f"plan.stages[{number}]")
            placed += [LayerAssignment(layer, run.strategy) for layer in chosen]
            start += len(chosen)
        stages.append(tuple(placed))
    if start < len(names):
        raise InputError("plan", plan.model, f"It says nothing about the layers {', '.join(names[start:])}.")
    return tuple(stages)


def _layers_of(run: LayerRun, layers: Sequence[Layer], names: list[str], start: int, field: str) -> Sequence[Layer]:
    for name in (run.first, run.last):
        if name not in names:
            raise InputError(f"{field}: layer", name, f"The model has no such layer. Its layers are: {shorten(names)}.")
    first, stop = names.index(run.first), names.index(run.last) + 1
    if first != start or stop - first != run.count:
        remedy = (
            f"The plan is for a model with other layers, or was changed: the next {run.count} layer(s) of this one are "
            f"{shorten(names[start : start + run.count])}. Plan for this model anew."
        )
        raise InputError(f"{field}: layers", f"{run.first} to {run.last}", remedy)
    return layers[first:stop]


def shorten(names: Sequence[str]) -> str:
    """Names with commas between; of many the first and the last ones."""
    shown = list(names) if len(names) <= 12 else [*names[:6], "...", *names[-5:]]
    return ", ".join(shown)


def glue_of(stage: Sequence[LayerAssignment]) -> LayerAssignment:
    """The layer in whose layout (with whole tokens) a stage's inputs lie, and what runs between its layers.

    It is the first of the edges, else the first block.
    """
    return next((placed for placed in stage if placed.layer.role is not Role.BLOCK), stage[0])


def glue_layout(stage: Sequence[LayerAssignment]) -> ActivationLayout:
    """The layout of a stage's inputs, and of what runs between its layers."""
    return glue_of(stage).layout.full_tokens


def check_samples(samples: int, plan: Plan, microbatches: int) -> None:
    """Raise InputError, naming the nearest sizes that can be used, where a batch cannot be shared evenly."""
    check_divisible(samples, [run.strategy.batch_degree for stage in plan.stages for run in stage.runs], microbatches)


def check_divisible(samples: int, degrees: Sequence[int], microbatches: int) -> None:
    """``check_samples`` by the ways in which layers share samples."""
    unit = microbatches * math.lcm(*degrees)
    if samples % unit or samples == 0:
        below, above = samples // unit * unit, (samples // unit + 1) * unit
        near = f"{below} or {above}" if below else f"{above}"
        raise InputError("batch", samples, f"The plan needs a multiple of {unit} samples; the nearest: {near}.")
