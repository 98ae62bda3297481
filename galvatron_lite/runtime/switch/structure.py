"""The modules of a model as they were at one moment, so that a split can be undone, in place.

Splitting changes classes (FSDP), attributes (local sizes), parameters, hooks and forwards of the user's own modules.
Undoing it in place, rather than splitting a copy, leaves every reference of the user's alone: their model, their hooks'
handles, functions that close over a module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed import _composable_state

CONTAINERS = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))
"""Attributes of a module that hold its parameters, buffers, modules and hooks: handles and iterators know the very
containers, so that their contents change and they stay."""
HOOKS = frozenset(name for name in CONTAINERS if "hooks" in name)
PLAIN = (bool, int, float, str, type(None), Enum)
OURS = ("torch.", "galvatron_lite.")


@dataclass(frozen=True, slots=True)
class Was:
    """A module at a moment."""

    module: nn.Module  # it
    kind: type[nn.Module]  # its class
    attributes: dict[str, Any]  # but for containers
    contents: dict[str, Any]  # of its containers
    state: Any  # what torch's composable functions (FSDP) keep about it; None where there is nothing


class Structure:
    """Every module of a model as it is now.

    Args:
        modules: all of them, each once.
        hollow: keep parameters as meta tensors only, shared where they are shared, so that no memory is held.
    """

    def __init__(self, modules: Iterable[nn.Module], hollow: bool = False) -> None:
        shells: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._was = [_was(module, shells if hollow else None) for module in modules]

    @property
    def modules(self) -> list[nn.Module]:
        """The modules."""
        return [one.module for one in self._was]

    def restore(self) -> None:
        """Make every module what it was."""
        for one in self._was:
            kept = {name: value for name, value in vars(one.module).items() if name in CONTAINERS}
            one.module.__class__ = one.kind
            vars(one.module).clear()
            vars(one.module).update({**one.attributes, **kept})
            for name, content in one.contents.items():
                _refill(vars(one.module)[name], content)
            _set_state(one.module, one.state)

    def changes(self) -> Changes:
        """What the user changed since: hooks, and plain attributes (``training``, a rate of dropout).

        Modules that also hold tensors they did not hold before (caches made in forward) keep none of their attributes
        but ``training``: what is plain there may count what is in the cache.
        """
        attributes, hooks = [], []
        for one in self._was:
            now = {name: value for name, value in vars(one.module).items() if name not in CONTAINERS}
            new = {name: value for name, value in now.items() if _is_new(name, value, one.attributes)}
            if any(not isinstance(value, PLAIN) for value in new.values()):
                new = {name: value for name, value in new.items() if name == "training"}
            attributes.append((one.module, new))
            hooks += _changed_hooks(one)
        return Changes(attributes, hooks)

    def take_in(self, changes: Changes) -> None:
        """Be as if the user had made their changes before."""
        known = {id(one.module): one for one in self._was}
        for module, new in changes.attributes:
            known[id(module)].attributes.update(new)
        for module, name, changed in changes.hooks:
            _change(known[id(module)].contents.setdefault(name, type(vars(module)[name])()), changed)


@dataclass(frozen=True, slots=True)
class Changes:
    """What the user changed."""

    attributes: list[tuple[nn.Module, dict[str, Any]]]  # new values, by module
    # of a module: the name of the container, and what was added to it or removed (None), by key
    hooks: list[tuple[nn.Module, str, dict[Any, Any]]]

    def apply(self) -> None:
        """Change it again."""
        for module, new in self.attributes:
            vars(module).update(new)
        for module, name, changed in self.hooks:
            _change(vars(module)[name], changed)


def _change(hooks: dict[Any, Any], changed: Mapping[Any, Any]) -> None:
    for key, hook in changed.items():
        if hook is None:
            hooks.pop(key, None)
        else:
            hooks[key] = hook


def _was(module: nn.Module, shells: dict[int, tuple[nn.Parameter, nn.Parameter]] | None) -> Was:
    attributes = {name: value for name, value in vars(module).items() if name not in CONTAINERS}
    contents = {name: value.copy() for name, value in vars(module).items() if name in CONTAINERS}
    if shells is not None:
        contents["_parameters"] = {
            name: None if one is None else _shell(one, shells) for name, one in contents["_parameters"].items()
        }
    return Was(module, type(module), attributes, contents, _state(module))


def _shell(parameter: nn.Parameter, shells: dict[int, tuple[nn.Parameter, nn.Parameter]]) -> nn.Parameter:
    """A parameter without values; the original is kept along only while shells are made."""
    if id(parameter) not in shells:
        empty = torch.empty_like(parameter, device="meta", requires_grad=False)
        made = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        vars(made).update(vars(parameter))
        shells[id(parameter)] = parameter, made
    return shells[id(parameter)][1]


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.update(content)


def _is_new(name: str, value: object, before: Mapping[str, Any]) -> bool:
    if name not in before:
        return True
    old = before[name]
    return old is not value and not (isinstance(value, PLAIN) and type(old) is type(value) and old == value)


def _changed_hooks(one: Was) -> list[tuple[nn.Module, str, dict[Any, Any]]]:
    found, keys = [], _users_keys(one)
    for name in HOOKS & vars(one.module).keys():
        now, before = vars(one.module)[name], one.contents.get(name, {})
        changed = {key: hook for key, hook in now.items() if key not in before and key in keys}
        changed |= {key: None for key in before if key not in now and key in keys}
        if changed:
            found.append((one.module, name, changed))
    return found


def _users_keys(one: Was) -> set[int]:
    """Keys of the user's own hooks; some containers hold flags by the same keys."""
    both = [hooks for name in HOOKS for hooks in (one.contents.get(name, {}), vars(one.module).get(name, {}))]
    return {key for hooks in both for key, hook in hooks.items() if callable(hook) and _is_users(hook)}


def _is_users(hook: object) -> bool:
    """Whether a hook is the user's own: neither torch nor this package adds any to a split model, but for compiling."""
    made_in = getattr(hook, "__module__", None) or type(hook).__module__
    return not f"{made_in}.".startswith(OURS)


def _state(module: nn.Module) -> Any:
    # private: torch keeps FSDP's states by module, has no public way to take one away, and refuses a second one
    known = _composable_state._module_state_mapping.get(module)
    return None if known is None else known()


def _set_state(module: nn.Module, state: Any) -> None:
    _composable_state._module_state_mapping.pop(module, None)
    if state is not None:
        _composable_state._insert_module_state(module, state)
