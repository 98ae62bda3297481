"""The parts of a model with branches: the trunk and the branches, with their layers and ranks.

The trunk is the user's model, in which stand-ins replace the modules of the branches. A branch is a model of its own,
whose modules have the same paths as in the user's model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import batch_size, call_model, map_tensors, resize_batch
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.trace.meta import meta_copy
from galvatron_lite.parallelism.layout import Layout, strategy_with
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import check_plan
from galvatron_lite.plans.schema import BranchPlacement, Plan, Stage
from galvatron_lite.runtime.activations.layout import ActivationLayout, AxisSplit, Boxes, nothing
from galvatron_lite.runtime.assignment import LayerAssignment, glue_layout, place_layers
from galvatron_lite.runtime.branches.pending import resolved

TRUNK = "trunk"


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """The trunk or a branch."""

    name: str
    first: int  # first rank
    devices: int  # number of consecutive ranks
    stage: tuple[LayerAssignment, ...]  # layers and strategies
    roots: tuple[str, ...] = ()  # paths of the modules of a branch; empty for the trunk
    layout: ActivationLayout = field(init=False)  # of tensors that enter and leave the part

    def __post_init__(self) -> None:
        # computed once, as every call reads it
        object.__setattr__(self, "layout", glue_layout(self.stage))

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of the part."""
        return tuple(placed.layer for placed in self.stage)

    def entering(self, shape: tuple[int, ...]) -> AxisSplit:
        """Return the split of a tensor with samples that enters the part."""
        return self.layout.hidden(shape) if self.layout.splits_pixels else self.layout.samples(shape)

    def boxes(self, split: AxisSplit, shape: tuple[int, ...], world: int) -> tuple[Boxes, ...]:
        """Return the boxes that each rank of the world holds of a tensor with the full shape ``shape``."""
        ranks = range(self.first, self.first + self.devices)
        none = nothing(len(shape))
        return tuple((split.box(rank - self.first, shape) if rank in ranks else none,) for rank in range(world))


def place_parts(plan: Plan, layers: Sequence[Layer]) -> tuple[PlacedPart, ...]:
    """Return the trunk, then the branches in the order of the plan.

    Raises:
        InputError: the plan contradicts itself, or is for another model.
    """
    check_plan(plan)
    homes = {layer.name: _home(layer, plan.branches) for layer in layers}
    parts = []
    for branch in plan.branches:
        members = [layer for layer in layers if homes[layer.name] == branch.name]
        if not members:
            remedy = "The model has no layers there; make the plan anew, for this model."
            raise InputError(f"branch {branch.name}", ", ".join(branch.roots), remedy)
        stage = _placed(plan, Stage(branch.runs), members)
        parts.append(PlacedPart(branch.name, branch.first, branch.devices, stage, branch.roots))
    return _trunk(plan, [layer for layer in layers if not homes[layer.name]]), *parts


def _home(layer: Layer, branches: Sequence[BranchPlacement]) -> str:
    """The name of the branch that contains a layer; empty: the trunk."""
    roots = [(branch.name, f"{root}.") for branch in branches for root in branch.roots]
    homes = {next((name for name, root in roots if f"{path}.".startswith(root)), "") for path in layer.modules}
    if len(homes) > 1:
        where = ", ".join(sorted(name or "the trunk" for name in homes))
        raise InputError("layer", layer.name, f"Modules of it lie in {where}; a layer has one home.")
    return next(iter(homes), "")


def _trunk(plan: Plan, layers: Sequence[Layer]) -> PlacedPart:
    """The trunk. Without layers it still computes the code between layers and the loss."""
    if layers:
        return PlacedPart(TRUNK, 0, plan.devices, _placed(plan, plan.stages[0], layers))
    degrees = [run.strategy.batch_degree for branch in plan.branches for run in branch.runs]
    shared = plan.microbatch % plan.devices == 0 and all(plan.devices % degree == 0 for degree in degrees)
    strategy = strategy_with(Layout(batch=plan.devices)) if shared else Strategy()
    return PlacedPart(TRUNK, 0, plan.devices, (LayerAssignment(Layer(TRUNK, TRUNK, Role.BEFORE), strategy),))


def _placed(plan: Plan, stage: Stage, layers: Sequence[Layer]) -> tuple[LayerAssignment, ...]:
    return place_layers(replace(plan, stages=(stage,)), layers)[0]


class Stream:
    """The random states of a branch, which are separate so that a branch does not change the trunk's random numbers."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._gpus = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(self._gpus):
            torch.manual_seed(seed)
            self._states = self._current()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return a context in which random numbers come from this stream."""
        with torch.random.fork_rng(self._gpus):
            torch.set_rng_state(self._states[0])
            for gpu, state in zip(self._gpus, self._states[1:], strict=True):
                torch.cuda.set_rng_state(state, gpu)
            try:
                yield
            finally:
                self._states = self._current()

    def state(self) -> list[Tensor]:
        """Return the current states."""
        return list(self._states)

    def set_state(self, state: list[Tensor]) -> None:
        """Set the states to those from ``state``."""
        self._states = list(state)

    def _current(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in self._gpus)]


class StandIn(nn.Module):
    """Replaces a module in the trunk, and is called as the module is.

    Attributes:
        path: of the module.
        stands_for: the module. It is not registered as a submodule, so the stand-in has no parameters.
    """

    def __init__(self, path: str, stands_for: nn.Module, call: Callable[[StandIn, Any, dict[str, Any]], Any]) -> None:
        super().__init__()
        self.path = path
        self.__dict__["stands_for"], self.__dict__["call"] = stands_for, call
        self.training = stands_for.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the branch, which may run later and on other ranks."""
        return self.__dict__["call"](self, args, kwargs)

    def train(self, mode: bool = True) -> StandIn:
        """Set the training mode of the stand-in and of the module."""
        self.__dict__["stands_for"].train(mode)
        return super().train(mode)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["stands_for"], name)


def entrances(model: nn.Module, roots: Sequence[str], batch: Any) -> tuple[str, ...]:
    """Return the paths of the modules of a branch that code outside the branch calls.

    If no module of a root is called, its outermost modules with a ``forward`` are returned.
    """
    for root in roots:
        if root not in dict(model.named_modules(remove_duplicate=False)):
            raise InputError("root of a branch", root, "The model has no such module.")
    called = _called(model, roots, batch) if batch is not None else None
    return tuple(path for root in roots for path in _covering(model, root, called))


def _called(model: nn.Module, roots: Sequence[str], batch: Any) -> set[str]:
    """The paths of the modules below the roots that code outside the roots calls, from a run on the meta device."""
    twin, running, called = meta_copy(model), list[str](), set[str]()
    twin.train(model.training)

    def enter(path: str, *_: Any) -> None:
        if not running:
            called.add(path)
        running.append(path)

    def leave(*_: Any) -> None:
        running.pop()

    for root in roots:
        for path, module in twin.get_submodule(root).named_modules(prefix=root):
            module.register_forward_pre_hook(partial(enter, path))
            module.register_forward_hook(leave)
    # code that reads values ends the run early; modules with a ``forward`` that were not reached count as called
    with suppress(Exception), torch.no_grad(), torch.device("meta"):
        call_model(twin, resize_batch(batch, batch_size(batch)))
    return called


def _covering(model: nn.Module, path: str, called: set[str] | None) -> list[str]:
    """The outermost modules at or below a path that are called, or have a ``forward`` and no called submodule."""
    module = model.get_submodule(path)
    is_container = type(module).forward is nn.Module.forward
    calls_inside = any(other.startswith(f"{path}.") for other in called or ())
    if (called is not None and path in called) or not (is_container or calls_inside):
        return [path]
    return [inner for name, _ in module.named_children() for inner in _covering(model, f"{path}.{name}", called)]


def skeleton(model: nn.Module, paths: Sequence[str]) -> nn.Module:
    """Return a model that contains only the modules at some paths of a model, at the same paths."""
    top = _shell(model)
    for path in paths:
        *parents, name = path.split(".")
        node, parent_path = top, ""
        for parent in parents:
            parent_path = f"{parent_path}.{parent}".lstrip(".")
            if parent not in dict(node.named_children()):
                node.add_module(parent, _shell(model.get_submodule(parent_path)))
            node = node.get_submodule(parent)
        node.add_module(name, model.get_submodule(path))
    return top


def _shell(module: nn.Module) -> nn.Module:
    """An empty module with the same rule for initial values (see ``materialize``)."""
    shell, rule = nn.Module(), getattr(module, "_init_weights", None)
    if callable(rule):
        shell._init_weights = rule
    return shell


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a module by another, everywhere in a model."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children skips repeated modules
            if child is old:
                setattr(parent, name, new)


def resolve_outside(model: nn.Module, paths: Sequence[str]) -> None:
    """Resolve pending tensors in the arguments of the modules at some paths, and in the output of the model."""

    def resolve(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return map_tensors(args, resolved), map_tensors(kwargs, resolved)

    for path in paths:
        model.get_submodule(path).register_forward_pre_hook(resolve, prepend=True, with_kwargs=True)
    forward = model.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return map_tensors(forward(*args, **kwargs), resolved)

    model.forward = run
