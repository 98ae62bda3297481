"""Stand-ins: what the model holds in the place of a branch's modules, which live in a tree of their own.

The trunk then is the user's model without the branches' parameters, and a branch a model by itself whose modules have
the paths that they have in the user's model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import batch_size, call_model, map_tensors, resize_batch
from galvatron_lite.model.trace_meta import meta_copy
from galvatron_lite.runtime.branches.pending import resolved


class StandIn(nn.Module):
    """Called like the module in whose place it is.

    Attributes:
        path: of the module.
        stands_for: the module; not registered, so that this has no parameters. Attributes are its own.
    """

    def __init__(self, path: str, stands_for: nn.Module, call: Callable[[StandIn, Any, dict[str, Any]], Any]) -> None:
        super().__init__()
        self.path = path
        self.__dict__["stands_for"], self.__dict__["call"] = stands_for, call
        self.training = stands_for.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the branch makes of the arguments, perhaps later and elsewhere."""
        return self.__dict__["call"](self, args, kwargs)

    def train(self, mode: bool = True) -> StandIn:
        """Set the mode of the module, too."""
        self.__dict__["stands_for"].train(mode)
        return super().train(mode)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["stands_for"], name)


def entrances(model: nn.Module, roots: Sequence[str], batch: Any) -> tuple[str, ...]:
    """The modules of a branch that code outside it calls, and below the roots those that nobody calls.

    Args:
        model: the whole model; not changed.
        roots: paths of modules that hold the branch; containers that are not called themselves among them.
        batch: an example; None: what has a forward of its own is called.

    Raises:
        InputError: the model has no module of that path.
    """
    for root in roots:
        if root not in dict(model.named_modules(remove_duplicate=False)):
            raise InputError("root of a branch", root, "The model has no such module.")
    called = _called(model, roots, batch) if batch is not None else None
    return tuple(path for root in roots for path in _covering(model, root, called))


def _called(model: nn.Module, roots: Sequence[str], batch: Any) -> set[str]:
    twin, inside, found = meta_copy(model), [0], set[str]()
    twin.train(model.training)

    def enter(path: str) -> None:
        if not inside[0]:
            found.add(path)
        inside[0] += 1

    def leave() -> None:
        inside[0] -= 1

    for root in roots:
        for path, module in twin.get_submodule(root).named_modules(prefix=root):
            module.register_forward_pre_hook(lambda *_, path=path: enter(path))
            module.register_forward_hook(lambda *_: leave())
    # code that looks at values ends the run; what is called behind it is taken to be what has a forward of its own
    with suppress(Exception), torch.no_grad(), torch.device("meta"):
        call_model(twin, resize_batch(batch, batch_size(batch)))
    return found


def _covering(model: nn.Module, path: str, called: set[str] | None) -> list[str]:
    module = model.get_submodule(path)
    if called is None:
        whole = not _has_no_forward(module)
    else:
        whole = path in called or not (_has_no_forward(module) or any(one.startswith(f"{path}.") for one in called))
    if whole:
        return [path]
    return [found for name, _ in module.named_children() for found in _covering(model, f"{path}.{name}", called)]


def _has_no_forward(module: nn.Module) -> bool:
    """Whether a module is a container alone, such as ModuleList."""
    return type(module).forward is nn.Module.forward


def skeleton(model: nn.Module, paths: Sequence[str]) -> nn.Module:
    """A tree that holds modules of a model at the paths that they have in it, and nothing else."""
    top = _shell(model)
    for path in paths:
        *above, name = path.split(".")
        node, at = top, ""
        for part in above:
            at = f"{at}.{part}".lstrip(".")
            if part not in dict(node.named_children()):
                node.add_module(part, _shell(model.get_submodule(at)))
            node = node.get_submodule(part)
        node.add_module(name, model.get_submodule(path))
    return top


def _shell(module: nn.Module) -> nn.Module:
    """A module without content, which gives the initial values that the module gives (see ``materialize``)."""
    shell, rule = nn.Module(), getattr(module, "_init_weights", None)
    if callable(rule):
        shell._init_weights = rule
    return shell


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, wherever the model holds that."""
    for holder in list(model.modules()):
        for name, child in list(holder.named_children()):
            if child is old:
                setattr(holder, name, new)


def resolve_outside(model: nn.Module, paths: Sequence[str]) -> None:
    """Bring what is pending here where other modules of the model take it, and where the model ends.

    Args:
        model: changed in place.
        paths: of those modules.
    """
    for path in paths:
        model.get_submodule(path).register_forward_pre_hook(_resolve_arguments, prepend=True, with_kwargs=True)
    forward = model.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        return map_tensors(forward(*args, **kwargs), resolved)

    model.forward = run


def _resolve_arguments(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return map_tensors(args, resolved), map_tensors(kwargs, resolved)
