"""The model before it was split, and its modules at one moment, so that a split can be undone in place.

Splitting changes classes (FSDP), attributes (local sizes), parameters, hooks and forwards of the user's own modules.
Undoing it in place, rather than splitting a copy, keeps every reference of the user's valid: their model, their hooks'
handles, functions that close over a module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed import _composable_state

from galvatron_lite.model.graph import Layer
from galvatron_lite.parallelism.lines import lines_of
from galvatron_lite.parallelism.precision import compute_dtype
from galvatron_lite.parallelism.process_groups import ProcessGroups
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.assignment import place_layers
from galvatron_lite.runtime.preparation import Prepared, SetupOptions, prepare

CONTAINERS = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))
"""Attributes of a module that hold parameters, buffers, modules and hooks. Handles and iterators refer to the
containers, so their contents are changed, never the containers."""
HOOKS = frozenset(name for name in CONTAINERS if "hooks" in name)
PLAIN = (bool, int, float, str, type(None), Enum)
OURS = ("torch.", "galvatron_lite.")
PREPARED = 8
"""Plans of which the preparation is kept."""


@dataclass(slots=True)
class OriginalModel:
    """A model before it was split; make it before that."""

    model: nn.Module  # the user's, which is split in place
    layers: Sequence[Layer]
    batch: Any  # an example
    options: SetupOptions
    precision: str | None  # of compute, whatever plans say; None: as each plan says
    unsplit: Structure = field(init=False)  # its modules before, without values
    split: Structure | None = None  # its modules right after the last split
    tensor_plans: dict[str, TensorPlan] = field(default_factory=dict)  # how layers can be split, as far as inferred
    prepared: dict[object, Prepared] = field(default_factory=dict)  # of the last plans, by their stages

    def __post_init__(self) -> None:
        self.unsplit = Structure(self.model.modules(), meta=True)

    def settle(self) -> None:
        """The model was split: later differences are the user's changes."""
        self.split = Structure(self.model.modules())

    def everything(self) -> Structure:
        """All present modules, including those that only the complete model has."""
        modules = {id(module): module for module in (*self.unsplit.modules, *self.model.modules())}
        return Structure(modules.values())

    def options_of(self, plan: Plan, groups: ProcessGroups) -> SetupOptions:
        """How the model is set up under another plan."""
        compute = compute_dtype(self.precision or plan.precision)
        return replace(self.options, compute=compute, groups=groups, examined=None)

    def prepare(self, plan: Plan, options: SetupOptions, batch: Any, rank: int) -> Prepared:
        """Prepare the complete model for a plan; cached for the last few splits."""
        if batch is not self.batch:
            self.prepared.clear()
        key = plan.schedule, plan.virtual_stages, tuple(stage.runs for stage in plan.stages)
        prepared = self.prepared.pop(key, None)
        if prepared is None:
            tensor = options.tensor_plans
            if tensor is None:
                placed = [layer for stage in place_layers(plan, self.layers) for layer in stage]
                wanted = {layer.layer.name for layer in placed if lines_of(layer.strategy).matmuls.size > 1}
                tensor = self.tensor_plans if wanted <= self.tensor_plans.keys() else None
            group = rank // plan.stage_devices
            prepared = prepare(self.model, plan, self.layers, batch, group, replace(options, tensor_plans=tensor))
            self.tensor_plans.update(prepared.examined.tensor)
        self.prepared[key] = prepared
        while len(self.prepared) > PREPARED:
            del self.prepared[next(iter(self.prepared))]
        return replace(prepared, plan=plan)


@dataclass(frozen=True, slots=True)
class ModuleState:
    """A module at a moment."""

    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any]  # without containers
    contents: dict[str, Any]  # of its containers
    composable: Any  # torch's state of composable functions (FSDP); None where there is none


@dataclass(frozen=True, slots=True)
class Changes:
    """What the user changed."""

    attributes: list[tuple[nn.Module, dict[str, Any]]]  # new values, by module
    # of a module: the name of the container, and what was added to it or removed (None), by key
    hooks: list[tuple[nn.Module, str, dict[Any, Any]]]

    def apply(self) -> None:
        """Change the modules again."""
        for module, new in self.attributes:
            vars(module).update(new)
        for module, name, changed in self.hooks:
            _change(vars(module)[name], changed)


class Structure:
    """Every module of a model as it is now.

    Args:
        modules: each once.
        meta: keep parameters as meta tensors, shared where they are shared, so that no memory is held.
    """

    def __init__(self, modules: Iterable[nn.Module], meta: bool = False) -> None:
        shells: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._states = []
        for module in modules:
            attributes = {name: value for name, value in vars(module).items() if name not in CONTAINERS}
            contents = {name: value.copy() for name, value in vars(module).items() if name in CONTAINERS}
            if meta:
                parameters = contents["_parameters"].items()
                contents["_parameters"] = {
                    name: None if one is None else _shell(one, shells) for name, one in parameters
                }
            # private: torch keeps FSDP's states by module, has no public way to remove one, and refuses a second one
            reference = _composable_state._module_state_mapping.get(module)
            composable = None if reference is None else reference()
            self._states.append(ModuleState(module, type(module), attributes, contents, composable))

    @property
    def modules(self) -> list[nn.Module]:
        """The modules."""
        return [state.module for state in self._states]

    def restore(self) -> None:
        """Make every module what it was."""
        for state in self._states:
            containers = {name: value for name, value in vars(state.module).items() if name in CONTAINERS}
            state.module.__class__ = state.kind
            vars(state.module).clear()
            vars(state.module).update({**state.attributes, **containers})
            for name, content in state.contents.items():
                vars(state.module)[name].clear()
                vars(state.module)[name].update(content)
            _composable_state._module_state_mapping.pop(state.module, None)
            if state.composable is not None:
                _composable_state._insert_module_state(state.module, state.composable)

    def changes(self) -> Changes:
        """What the user changed since: hooks, and plain attributes (``training``, a rate of dropout).

        Of modules that now hold tensors they did not hold before (caches made in forward) only ``training`` is kept:
        plain attributes there may count what is in the cache.
        """
        attributes, hooks = [], []
        for state in self._states:
            now = {name: value for name, value in vars(state.module).items() if name not in CONTAINERS}
            new = {name: value for name, value in now.items() if _is_new(name, value, state.attributes)}
            if any(not isinstance(value, PLAIN) for value in new.values()):
                new = {name: value for name, value in new.items() if name == "training"}
            attributes.append((state.module, new))
            hooks += _changed_hooks(state)
        return Changes(attributes, hooks)

    def take_in(self, changes: Changes) -> None:
        """Be as if the user had made their changes before."""
        states = {id(state.module): state for state in self._states}
        for module, new in changes.attributes:
            states[id(module)].attributes.update(new)
        for module, name, changed in changes.hooks:
            _change(states[id(module)].contents.setdefault(name, type(vars(module)[name])()), changed)


def _change(hooks: dict[Any, Any], changed: Mapping[Any, Any]) -> None:
    for key, hook in changed.items():
        if hook is None:
            hooks.pop(key, None)
        else:
            hooks[key] = hook


def _shell(parameter: nn.Parameter, shells: dict[int, tuple[nn.Parameter, nn.Parameter]]) -> nn.Parameter:
    """A parameter without values; ``shells`` keeps the originals alive, as it knows them by identity."""
    if id(parameter) not in shells:
        empty = torch.empty_like(parameter, device="meta", requires_grad=False)
        shell = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        vars(shell).update(vars(parameter))
        shells[id(parameter)] = parameter, shell
    return shells[id(parameter)][1]


def _is_new(name: str, value: object, before: Mapping[str, Any]) -> bool:
    if name not in before:
        return True
    old = before[name]
    return old is not value and not (isinstance(value, PLAIN) and type(old) is type(value) and old == value)


def _changed_hooks(state: ModuleState) -> list[tuple[nn.Module, str, dict[Any, Any]]]:
    both = [hooks for name in HOOKS for hooks in (state.contents.get(name, {}), vars(state.module).get(name, {}))]
    # some containers hold flags by the same keys
    keys = {key for hooks in both for key, hook in hooks.items() if callable(hook) and _is_users(hook)}
    found = []
    for name in HOOKS & vars(state.module).keys():
        now, before = vars(state.module)[name], state.contents.get(name, {})
        changed = {key: hook for key, hook in now.items() if key not in before and key in keys}
        changed |= {key: None for key in before if key not in now and key in keys}
        if changed:
            found.append((state.module, name, changed))
    return found


def _is_users(hook: object) -> bool:
    """Whether a hook is the user's: torch and this package add none to a split model, but for compiling."""
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return not f"{origin}.".startswith(OURS)
