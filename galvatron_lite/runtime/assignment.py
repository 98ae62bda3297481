"""The assignment of layers: the stage, strategy and layout that a plan gives each layer of a model."""

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
    """A layer and its strategy."""

    layer: Layer
    strategy: Strategy

    @property
    def layout(self) -> ActivationLayout:
        """The layout of the layer's inputs and outputs. Layers before and after the blocks have all tokens of their
        samples."""
        layout = ActivationLayout.of(self.strategy)
        return layout if self.layer.role is Role.BLOCK else layout.replicated("sequence")


Stages = tuple[tuple[LayerAssignment, ...], ...]


def place_layers(plan: Plan, layers: Sequence[Layer]) -> Stages:
    """Assign the layers of a model to the stages and strategies of a plan.

    Raises:
        InputError: the plan names a layer the model does not have, leaves one out, or has them in another order.
    """
    names = [layer.name for layer in layers]
    stages, start = list[tuple[LayerAssignment, ...]](), 0
    for number, stage in enumerate(plan.stages):
        placed: list[LayerAssignment] = []
        for run in stage.runs:
            layers_of_run = _layers_of(run, layers, names, start, f"plan.stages[{number}]")
            placed += [LayerAssignment(layer, run.strategy) for layer in layers_of_run]
            start += len(layers_of_run)
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
    """Join names by commas; of many only the first and the last."""
    shown = list(names) if len(names) <= 12 else [*names[:6], "...", *names[-5:]]
    return ", ".join(shown)


def glue_of(stage: Sequence[LayerAssignment]) -> LayerAssignment:
    """The layer whose layout, with all tokens, is that of a stage's inputs and of the code between its layers.

    It is the first layer that is no block, or else the first block.
    """
    return next((placed for placed in stage if placed.layer.role is not Role.BLOCK), stage[0])


def glue_layout(stage: Sequence[LayerAssignment]) -> ActivationLayout:
    """The layout of a stage's inputs, and of the code between its layers."""
    return glue_of(stage).layout.full_tokens


def check_samples(samples: int, plan: Plan, microbatches: int) -> None:
    """Raise InputError, which names the nearest sizes that can be used, if a batch cannot be shared evenly."""
    runs = [stage.runs for stage in plan.stages] + [branch.runs for branch in plan.branches]
    unit = microbatches * math.lcm(*(run.strategy.batch_degree for part in runs for run in part))
    if samples % unit or samples == 0:
        below, above = samples // unit * unit, (samples // unit + 1) * unit
        near = f"{below} or {above}" if below else f"{above}"
        raise InputError("batch", samples, f"The plan needs a multiple of {unit} samples; the nearest: {near}.")
