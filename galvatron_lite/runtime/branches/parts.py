"""What a plan with branches says of a model's layers: those of the trunk, and of each branch, and their ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import BranchPlacement, Plan, Stage
from galvatron_lite.runtime.layout import AxisSplit, Box, Layout, nothing
from galvatron_lite.runtime.mesh import MeshPart
from galvatron_lite.runtime.placement import LayerAssignment, glue_layout, glue_of, place_layers

TRUNK = "trunk"


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """The trunk or a branch."""

    name: str  # of it
    first: int  # its first rank
    devices: int  # how many consecutive ranks
    stage: tuple[LayerAssignment, ...]  # its layers and strategies
    roots: tuple[str, ...] = ()  # paths of the modules that hold it; none of the trunk
    layout: Layout = field(init=False)  # how what enters and leaves lies on its ranks

    def __post_init__(self) -> None:
        """Asked at every call."""
        object.__setattr__(self, "layout", glue_layout(self.stage))

    @property
    def ranks(self) -> range:
        """Those that run it."""
        return range(self.first, self.first + self.devices)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Its layers."""
        return tuple(placed.layer for placed in self.stage)

    @property
    def mesh(self) -> MeshPart:
        """What process groups are made for."""
        return MeshPart(self.first, self.devices, tuple(placed.strategy for placed in self.stage))

    def entering(self, shape: tuple[int, ...]) -> AxisSplit:
        """How a tensor of the samples lies that enters."""
        pixels = glue_of(self.stage).strategy.spatial > 1
        return self.layout.hidden(shape) if pixels else self.layout.samples(shape)

    def boxes(self, split: AxisSplit, shape: tuple[int, ...], world: int) -> tuple[Box, ...]:
        """By rank of the world, what it holds of a tensor of that whole shape."""
        return tuple(
            split.box(rank - self.first, shape) if rank in self.ranks else nothing(len(shape)) for rank in range(world)
        )


def place_parts(plan: Plan, layers: Sequence[Layer]) -> tuple[PlacedPart, ...]:
    """The trunk, then the branches in the plan's order.

    Raises:
        InputError: the plan does not fit the model or itself: more than one stage, a branch that the model has not, a
            layer that lies half in a branch.
    """
    if len(plan.stages) != 1:
        raise InputError("plan", f"{len(plan.stages)} stages", "A plan with branches has one, of the other layers.")
    homes = {layer.name: _home(layer, plan.branches) for layer in layers}
    parts = []
    for branch in plan.branches:
        own = [layer for layer in layers if homes[layer.name] == branch.name]
        if not own:
            remedy = "The model has no layers there; make the plan anew, for this model."
            raise InputError(f"branch {branch.name}", ", ".join(branch.roots), remedy)
        stage = _placed(plan, Stage(branch.runs), own)
        _check_devices(branch.name, stage, (branch.devices,))
        parts.append(PlacedPart(branch.name, branch.first, branch.devices, stage, branch.roots))
    _check_ranks(plan)
    return _trunk(plan, [layer for layer in layers if not homes[layer.name]]), *parts


def check_rows(samples: int, parts: Sequence[PlacedPart], count: int) -> None:
    """Raise InputError where a batch cannot be shared evenly by every part; names the nearest that can."""
    degrees = [placed.strategy.batch_degree for part in parts for placed in part.stage]
    unit = count * math.lcm(*degrees)
    if samples % unit or samples == 0:
        below, above = samples // unit * unit, (samples // unit + 1) * unit
        near = f"{below} or {above}" if below else f"{above}"
        raise InputError("batch", samples, f"The plan needs a multiple of {unit} samples; the nearest: {near}.")


def _home(layer: Layer, branches: Sequence[BranchPlacement]) -> str:
    """The branch that a layer is of; empty: the trunk."""
    found = {next((b.name for b in branches if _under(path, b.roots)), "") for path in layer.modules}
    if len(found) > 1:
        remedy = (
            f"Modules of it lie in {', '.join(sorted(name or 'the trunk' for name in found))}; a layer has one home."
        )
        raise InputError("layer", layer.name, remedy)
    return next(iter(found), "")


def _under(path: str, roots: Sequence[str]) -> bool:
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def _trunk(plan: Plan, layers: Sequence[Layer]) -> PlacedPart:
    """The trunk; one without layers still has what no layer holds, and the loss."""
    if layers:
        stage = _placed(plan, plan.stages[0], layers)
        _check_devices(TRUNK, stage, (1, plan.devices))
        return PlacedPart(TRUNK, 0, plan.devices, stage)
    degrees = [run.strategy.batch_degree for branch in plan.branches for run in branch.runs]
    shared = plan.microbatch % plan.devices == 0 and all(plan.devices % degree == 0 for degree in degrees)
    strategy = Strategy(data=plan.devices) if shared else Strategy()
    return PlacedPart(TRUNK, 0, plan.devices, (LayerAssignment(Layer(TRUNK, TRUNK, Role.BEFORE), strategy),))


def _placed(plan: Plan, stage: Stage, layers: Sequence[Layer]) -> tuple[LayerAssignment, ...]:
    return place_layers(replace(plan, stages=(stage,)), layers)[0]


def _check_devices(name: str, stage: Sequence[LayerAssignment], allowed: Sequence[int]) -> None:
    found = {placed.strategy.devices for placed in stage}
    if not stage or len(found) > 1 or not found <= set(allowed):
        remedy = f"All its layers take {' or '.join(map(str, sorted(set(allowed))))} device(s)."
        raise InputError(f"strategies of {name}", f"of {sorted(found)} devices", remedy)


def _check_ranks(plan: Plan) -> None:
    for branch in plan.branches:
        first, stop = branch.first, branch.first + branch.devices
        if not 0 <= first < stop <= plan.devices:
            raise InputError(f"devices of {branch.name}", f"{first} to {stop - 1}", f"There are {plan.devices}.")
