"""Snapshots of the modules of a model, with which a split can be undone in place.

Splitting changes the classes (FSDP), attributes (local sizes), parameters, hooks and forwards of the user's modules.
A split is undone in place, rather than made on a copy, so that all references of the user stay valid: to the model, to
modules, and handles of hooks.
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
"""Attributes of a module that contain parameters, buffers, modules and hooks. Handles and iterators refer to these
containers, so their contents are replaced, never the containers."""
_HOOKS = frozenset(name for name in CONTAINERS if "hooks" in name)
_PLAIN = (bool, int, float, str, type(None), Enum)
_NOT_OF_USERS = ("torch.", "galvatron_lite.")
_CACHED = 8
"""Number of plans whose preparation is cached."""


@dataclass(slots=True)
class OriginalModel:
    """A model before it is split. Create it before the split."""

    model: nn.Module  # the user's, which is split in place
    layers: Sequence[Layer]
    batch: Any  # an example
    options: SetupOptions
    precision: str | None  # of compute under all plans; None: the precision of each plan
    unsplit: Structure = field(init=False)  # the modules before the split, without values
    split: Structure | None = None  # the modules right after the last split
    tensor_plans: dict[str, TensorPlan] = field(default_factory=dict)  # of the layers examined so far
    prepared: dict[object, Prepared] = field(default_factory=dict)  # cached preparations, least recently used first

    def __post_init__(self) -> None:
        self.unsplit = Structure(self.model.modules(), meta=True)

    def settle(self) -> None:
        """Note that the model was split: later differences are changes of the user."""
        self.split = Structure(self.model.modules())

    def everything(self) -> Structure:
        """Return a snapshot of all current modules, including those that only the unsplit model has."""
        modules = {id(module): module for module in (*self.unsplit.modules, *self.model.modules())}
        return Structure(modules.values())

    def options_of(self, plan: Plan, groups: ProcessGroups) -> SetupOptions:
        """Return the options for splitting the model by another plan."""
        compute = compute_dtype(self.precision or plan.precision)
        return replace(self.options, compute=compute, groups=groups, examined=None)

    def prepare(self, plan: Plan, options: SetupOptions, batch: Any, rank: int) -> Prepared:
        """Prepare the unsplit model for a plan. The last few preparations are cached."""
        if batch is not self.batch:
            self.prepared.clear()
        key = plan.schedule, plan.virtual_stages, tuple(stage.runs for stage in plan.stages)
        prepared = self.prepared.pop(key, None)
        if prepared is None:
            tensor = options.tensor_plans
            if tensor is None:
                placed = [layer for stage in place_layers(plan, self.layers) for layer in stage]
                needed = {layer.layer.name for layer in placed if lines_of(layer.strategy).matmuls.size > 1}
                tensor = self.tensor_plans if needed <= self.tensor_plans.keys() else None
            stage_group = rank // plan.stage_devices
            options = replace(options, tensor_plans=tensor)
            prepared = prepare(self.model, plan, self.layers, batch, stage_group, options)
            self.tensor_plans.update(prepared.examined.tensor)
        self.prepared[key] = prepared
        while len(self.prepared) > _CACHED:
            del self.prepared[next(iter(self.prepared))]
        return replace(prepared, plan=plan)


@dataclass(frozen=True, slots=True)
class ModuleState:
    """A snapshot of a module."""

    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any]  # without containers
    contents: dict[str, Any]  # of the containers
    composable: Any  # torch's state of composable functions (FSDP); None: there is none


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes that the user made to modules."""

    attributes: list[tuple[nn.Module, dict[str, Any]]]  # new values, by module
    # module, name of the container, and the hooks added or removed (None) by key
    hooks: list[tuple[nn.Module, str, dict[Any, Any]]]

    def apply(self) -> None:
        """Make the changes again."""
        for module, new in self.attributes:
            vars(module).update(new)
        for module, name, changed in self.hooks:
            _change(vars(module)[name], changed)


class Structure:
    """A snapshot of the modules of a model.

    Args:
        modules: each once.
        meta: store parameters as meta tensors, which hold no memory. Shared parameters stay shared.
    """

    def __init__(self, modules: Iterable[nn.Module], meta: bool = False) -> None:
        shells: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._states = []
        for module in modules:
            attributes = {name: value for name, value in vars(module).items() if name not in CONTAINERS}
            contents = {name: value.copy() for name, value in vars(module).items() if name in CONTAINERS}
            if meta:
                contents["_parameters"] = {
                    name: None if parameter is None else _shell(parameter, shells)
                    for name, parameter in contents["_parameters"].items()
                }
            # private: torch stores FSDP's states by module, has no public function to remove one, and refuses a second
            reference = _composable_state._module_state_mapping.get(module)
            composable = None if reference is None else reference()
            self._states.append(ModuleState(module, type(module), attributes, contents, composable))

    @property
    def modules(self) -> list[nn.Module]:
        """The modules."""
        return [state.module for state in self._states]

    def restore(self) -> None:
        """Restore the modules to this snapshot."""
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
        """Return the changes of the user since: hooks, and plain attributes (``training``, a dropout rate).

        If a module has new attributes that are not plain, such as a cache of tensors, only ``training`` is returned, as
        its plain attributes may describe the content of the cache.
        """
        attributes, hooks = [], []
        for state in self._states:
            now = {name: value for name, value in vars(state.module).items() if name not in CONTAINERS}
            new = {name: value for name, value in now.items() if _is_new(name, value, state.attributes)}
            if any(not isinstance(value, _PLAIN) for value in new.values()):
                new = {name: value for name, value in new.items() if name == "training"}
            attributes.append((state.module, new))
            hooks += _changed_hooks(state)
        return Changes(attributes, hooks)

    def take_in(self, changes: Changes) -> None:
        """Add changes of the user to the snapshot."""
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
    """The parameter on the meta device. ``shells`` is keyed by identity, so it keeps the parameters alive."""
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
    return old is not value and not (isinstance(value, _PLAIN) and type(old) is type(value) and old == value)


def _changed_hooks(state: ModuleState) -> list[tuple[nn.Module, str, dict[Any, Any]]]:
    containers = [
        hooks for name in _HOOKS for hooks in (state.contents.get(name, {}), vars(state.module).get(name, {}))
    ]
    # some containers store flags of a hook under the key of the hook
    keys = {key for hooks in containers for key, hook in hooks.items() if callable(hook) and _is_of_user(hook)}
    changes = []
    for name in _HOOKS & vars(state.module).keys():
        now, before = vars(state.module)[name], state.contents.get(name, {})
        changed = {key: hook for key, hook in now.items() if key not in before and key in keys}
        changed |= {key: None for key in before if key not in now and key in keys}
        if changed:
            changes.append((state.module, name, changed))
    return changes


def _is_of_user(hook: object) -> bool:
    """Whether the user added a hook; those of torch and of this package do not outlive a split."""
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return not f"{origin}.".startswith(_NOT_OF_USERS)
