"""The repeated blocks of a model, and the units that a model is made of: blocks and the modules between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import groupby, pairwise
from typing import Any

from torch import nn

from galvatron_lite.errors import TraceError
from galvatron_lite.model.trace.flow import inside

BlockNames = str | type[nn.Module] | Sequence[str | type[nn.Module]]
"""How a user names blocks: the path of a container or module, a module class, or a list of these."""

NEVER_RUN = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that only hold others."""

_LEAST_SHARE = 0.1  # of the model's parameters that a run of blocks has
_MOST = 0.75  # of the model's modules with weights: a child with more stands for the model
_FEWEST_PARTS = 3
_INDEX_WORDS = ("idx", "index", "layer_id", "layer_number")
_SETTING_TYPES = (int, float, str, bytes, type(None))


def find_blocks(model: nn.Module, blocks: BlockNames | None = None) -> list[str]:
    """Return the paths of the repeated blocks in registration order.

    If the user does not name them, the first of these rules that finds any decides:

    1. Runs of two or more adjacent children of one class in a ModuleList or Sequential, the outermost such runs; for a
       class of torch.nn at least two of the children must be structurally equal or nearly so. Runs with less than a
       tenth of the model's parameters do not count. Other modules of the class that stand in a ModuleList or Sequential
       are blocks, too (residual networks change width inside a run).
    2. Parts: three or more children that are made of several modules (levels of a U-Net, Sequentials one after the
       other), of the model or of the child that has most of its modules with weights.
    3. The children of one Sequential, the one that has most children with parameters (a plain chain of convolutions,
       pooling and activations).
    """
    if blocks is None:
        return _repeated_blocks(model) or _parts(model) or _sequential_children(model)
    names = [blocks] if isinstance(blocks, (str, type)) else blocks
    paths = {path for name in names for path in _paths_of_name(model, name)}
    return [path for path, _ in model.named_modules(remove_duplicate=False) if path in paths]


def _paths_of_name(model: nn.Module, name: str | type[nn.Module]) -> list[str]:
    modules = dict(model.named_modules())
    if isinstance(name, type):
        paths = _outermost([path for path, module in modules.items() if isinstance(module, name)])
    elif name not in modules:
        paths = []
    elif isinstance(modules[name], (nn.ModuleList, nn.Sequential)):
        paths = [_join(name, child) for child, _ in modules[name].named_children()]
    else:
        paths = [name]
    if not paths or paths == [""]:
        remedy = "Give the path of a ModuleList, Sequential or module (see model.named_modules()), or a module class."
        raise TraceError("blocks", name if isinstance(name, str) else name.__name__, remedy)
    return paths


def _outermost(paths: list[str]) -> list[str]:
    return [path for path in paths if not any(inside(path, other) for other in paths)]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _repeated_blocks(model: nn.Module) -> list[str]:
    modules = dict(model.named_modules())
    sizes = {path: sum(p.numel() for p in module.parameters()) for path, module in modules.items()}
    # a module that two others hold counts with the first of them
    runs = [run for run in _runs(model, "") if modules.keys() >= set(run)]
    large = [run for run in runs if sum(map(sizes.__getitem__, run)) >= _LEAST_SHARE * sizes[""] and sizes[""]]
    user_classes = {type(module) for module in modules.values() if not type(module).__module__.startswith("torch.nn.")}
    classes = {
        type(modules[run[0]])
        for run in large
        if type(modules[run[0]]) in user_classes or _are_alike([modules[path] for path in run])
    }
    chosen = {path for run in runs if type(modules[run[0]]) in classes for path in run}
    chosen |= {
        path
        for path, module in modules.items()
        if type(module) in classes & user_classes
        and isinstance(modules[path.rpartition(".")[0]], (nn.ModuleList, nn.Sequential))
    }
    return _outermost([path for path in modules if path in chosen])


def _runs(module: nn.Module, path: str) -> list[list[str]]:
    """Runs of adjacent children of one class, in the outermost containers that have such a run.

    Children have parameters; if no two are alike, none may contain a run itself.
    """
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        runs = []
        for kind, group in groupby(module.named_children(), key=lambda item: type(item[1])):
            names, children = zip(*group, strict=True)
            repeated = len(children) > 1 and has_parameters(children[0]) and kind is not nn.Module
            if repeated and (_are_alike(children) or not any(_runs(child, "") for child in children)):
                runs.append([_join(path, name) for name in names])
        if runs:
            return runs
    return [run for name, child in module.named_children() for run in _runs(child, _join(path, name))]


def _are_alike(children: Sequence[nn.Module]) -> bool:
    """Whether two are structurally equal, or adjacent ones have more than half of their parameters in common."""
    if max(Counter(signature(child) for child in children).values()) > 1:
        return True
    shapes = [{(name, p.shape) for name, p in child.named_parameters()} for child in children]
    return any(2 * len(left & right) > len(left | right) for left, right in pairwise(shapes))


def _parts(model: nn.Module, path: str = "") -> list[str]:
    """Children that are made of several modules, of the model or of the child that nearly all of it lies in."""
    if isinstance(model, nn.Sequential):
        return []
    weights = {  # modules inside that have parameters themselves
        name: sum(has_parameters(part, recurse=False) for part in child.modules())
        for name, child in model.named_children()
    }
    for name, leaves in weights.items():
        if leaves > _MOST * sum(weights.values()):
            return _parts(model.get_submodule(name), _join(path, name))
    parts = [
        _join(path, name)
        for name, child in model.named_children()
        if not isinstance(child, NEVER_RUN) and any(map(has_parameters, child.children()))
    ]
    return parts if len(parts) >= _FEWEST_PARTS else []


def _sequential_children(model: nn.Module) -> list[str]:
    """Children of the outermost Sequential that has most children with parameters, the first of equals."""
    rows = {path: module for path, module in model.named_modules() if isinstance(module, nn.Sequential)}
    outermost = _outermost(list(rows))
    if not outermost:
        return []
    path = max(outermost, key=lambda path: sum(has_parameters(child) for child in rows[path]))
    return [_join(path, name) for name, _ in rows[path].named_children()]


def has_parameters(module: nn.Module, recurse: bool = True) -> bool:
    """Whether a module has parameters, those of its submodules included if ``recurse``."""
    return any(True for _ in module.parameters(recurse))


def signature(module: nn.Module) -> Hashable:
    """Return a key that is equal for modules of the same classes, parameter and buffer shapes, and settings.

    Settings are the plain numbers and strings (and tuples of them) that modules hold as attributes, except for a
    layer's index (``layer_idx``) and for whether modules are in training mode.
    """
    parts = []
    for path, part in module.named_modules(remove_duplicate=False):
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        shapes = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)
        settings = sorted((name, repr(value)) for name, value in vars(part).items() if _is_setting(name, value))
        parts.append((path, type(part), shapes, tuple(settings)))
    return tuple(parts)


def _is_setting(name: str, value: Any) -> bool:
    if name.startswith("_") or name == "training" or any(word in name for word in _INDEX_WORDS):
        return False
    items = value if isinstance(value, (tuple, list)) else (value,)
    return all(isinstance(item, _SETTING_TYPES) for item in items)


def unit_paths(model: nn.Module, blocks: list[str], order: Sequence[str] = ()) -> list[str]:
    """Return the blocks, and the outermost modules outside of blocks that can run, in registration order.

    A module without a forward, or one that never ran in ``order`` although modules inside it did, is no unit itself.
    Shared modules appear once: a module that never ran and whose modules with parameters all lie in other units is
    another name for these.
    """
    chosen, ran = set(blocks), set(order)

    def only_holds(module: nn.Module, path: str) -> bool:
        if type(module).forward is nn.Module.forward and any(True for _ in module.children()):
            return True
        return path not in ran and any(inside(other, path) for other in ran)

    def units(module: nn.Module, path: str) -> list[str]:
        if path in chosen:
            return [path]
        if path and not only_holds(module, path) and not any(inside(block, path) for block in blocks):
            return [path]
        return [unit for name, child in module.named_children() for unit in units(child, _join(path, name))]

    first: dict[int, str] = {}
    for path in units(model, ""):
        first.setdefault(id(model.get_submodule(path)), path)
    owners = {  # modules with parameters, by unit
        path: {id(part) for part in model.get_submodule(path).modules() if has_parameters(part, recurse=False)}
        for path in first.values()
    }
    used = {path for path in owners if path in ran or path in chosen}
    held = {owner for path in used for owner in owners[path]}
    return [path for path, inner in owners.items() if path in used or not inner or not inner <= held]
