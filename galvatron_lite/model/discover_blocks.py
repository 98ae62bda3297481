"""Which modules of a model are its repeated blocks, and which blocks are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import groupby, pairwise
from typing import Any

from torch import nn

from galvatron_lite.errors import TraceError

BlockNames = str | type[nn.Module] | Sequence[str | type[nn.Module]]
"""How a user names blocks: the path of a container or module, a module class, or a list of these."""

_LEAST_SHARE = 0.1
_MOST = 0.75
_FEWEST_PARTS = 3

NEVER_RUN = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that only hold others."""
_INDEX_WORDS = ("idx", "index", "layer_id", "layer_number")
_SETTING_TYPES = (int, float, str, bytes, type(None))


def find_blocks(model: nn.Module, blocks: BlockNames | None = None) -> list[str]:
    """Paths of the repeated blocks in registration order.

    Unless the user names them they are runs of two or more neighbouring children of one class in a ModuleList or
    Sequential, the outermost such; of a class of torch.nn only where at least two of the children are structurally
    equal or nearly so. Runs with less than a tenth of the model's parameters do not count. Other modules of such a
    run's class that stand in a ModuleList or Sequential are blocks, too (residual networks change width inside a run).
    A model without any is cut into its parts: three or more of its children that are made of several modules (levels
    of a U-Net, Sequentials one after the other), or those of the child that has most of its modules with weights. A
    model without such parts (a plain chain of convolutions, pooling and activations) has as blocks the children of one
    Sequential, the one that has most children with parameters; without a Sequential it has no block.
    """
    if blocks is not None:
        return _named_blocks(model, blocks)
    return _repeated_blocks(model) or _parts(model) or _sequential_children(model)


def _named_blocks(model: nn.Module, blocks: BlockNames) -> list[str]:
    names = [blocks] if isinstance(blocks, (str, type)) else list(blocks)
    found = [path for name in names for path in _named(model, name)]
    order = [path for path, _ in model.named_modules()]
    return sorted(dict.fromkeys(found), key=order.index)


def _named(model: nn.Module, name: str | type[nn.Module]) -> list[str]:
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


def inside(path: str, ancestor: str) -> bool:
    """Whether a module path lies strictly below another."""
    return path != ancestor and (not ancestor or path.startswith(ancestor + "."))


def at(path: str, module: str) -> bool:
    """Whether a path is that of a module or lies inside it."""
    return path == module or inside(path, module)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _repeated_blocks(model: nn.Module) -> list[str]:
    modules = dict(model.named_modules())
    sizes = {path: sum(p.numel() for p in module.parameters()) for path, module in modules.items()}
    runs = _runs(model, "")
    large = [run for run in runs if sum(map(sizes.__getitem__, run)) >= _LEAST_SHARE * sizes[""] and sizes[""]]
    classes = {
        type(modules[run[0]])
        for run in large
        if _is_own(type(modules[run[0]])) or _some_alike([modules[path] for path in run])
    }
    own = tuple(kind for kind in classes if _is_own(kind))
    chosen = {path for run in runs if type(modules[run[0]]) in classes for path in run}
    chosen |= {path for path, module in modules.items() if type(module) in own and _is_listed(modules, path)}
    return _outermost([path for path in modules if path in chosen])


def _is_own(kind: type[nn.Module]) -> bool:
    return not kind.__module__.startswith("torch.nn.")


def _is_listed(modules: dict[str, nn.Module], path: str) -> bool:
    return isinstance(modules[path.rpartition(".")[0]], (nn.ModuleList, nn.Sequential))


def _runs(module: nn.Module, path: str) -> list[list[str]]:
    """Runs of neighbouring children of one class, in the outermost containers that have one."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        grouped = [list(group) for _, group in groupby(module.named_children(), key=lambda item: type(item[1]))]
        runs = [run for run in grouped if _is_run([child for _, child in run])]
        if runs:
            return [[_join(path, name) for name, _ in run] for run in runs]
    return [run for name, child in module.named_children() for run in _runs(child, _join(path, name))]


def _is_run(children: list[nn.Module]) -> bool:
    """Two or more children with parameters; some alike, or at least none a container of such."""
    if len(children) < 2 or not any(True for _ in children[0].parameters()):
        return False
    return _some_alike(children) or not any(_runs(child, "") for child in children)


def _some_alike(children: list[nn.Module]) -> bool:
    """Whether two are structurally equal, or neighbours have more than half of their parameters' shapes in common."""
    if max(Counter(signature(child) for child in children).values()) > 1:
        return True
    shapes = [{(name, p.shape) for name, p in child.named_parameters()} for child in children]
    return any(2 * len(one & other) > len(one | other) for one, other in pairwise(shapes))


def _parts(model: nn.Module, path: str = "") -> list[str]:
    """Children that are made of several modules, of the model or of what nearly all of it lies in; [] if too few."""
    if isinstance(model, nn.Sequential):
        return []
    weights = {name: _leaves(child) for name, child in model.named_children()}
    for name, count in weights.items():
        if count > _MOST * sum(weights.values()):
            return _parts(model.get_submodule(name), _join(path, name))
    parts = [
        _join(path, name)
        for name, child in model.named_children()
        if not isinstance(child, NEVER_RUN) and any(map(_is_weighty, child.children()))
    ]
    return parts if len(parts) >= _FEWEST_PARTS else []


def _leaves(module: nn.Module) -> int:
    """Modules inside that have parameters of their own."""
    return sum(any(True for _ in part.parameters(recurse=False)) for part in module.modules())


def _sequential_children(model: nn.Module) -> list[str]:
    """Children of the outermost Sequential that has most children with parameters, of equals the first."""
    rows = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Sequential)]
    chains = [(path, module) for path, module in rows if not any(inside(path, other) for other, _ in rows)]
    if not chains:
        return []
    path, chain = max(chains, key=lambda row: sum(_is_weighty(child) for child in row[1]))
    return [_join(path, name) for name, _ in chain.named_children()]


def _is_weighty(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def signature(module: nn.Module) -> Hashable:
    """A key that is equal for modules of the same class, parameter and buffer shapes, and settings, all the way down.

    Settings are the plain numbers and strings (and tuples of them) that the modules hold as attributes, but for those
    that only say which place a layer has (``layer_idx``). Whether the modules train or not is no part of it.
    """
    return tuple((path, _own_signature(part)) for path, part in module.named_modules(remove_duplicate=False))


def _own_signature(module: nn.Module) -> Hashable:
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    shapes = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)
    settings = tuple(sorted((name, repr(value)) for name, value in vars(module).items() if _is_setting(name, value)))
    return type(module), shapes, settings


def _is_setting(name: str, value: Any) -> bool:
    if name.startswith("_") or name == "training" or any(word in name for word in _INDEX_WORDS):
        return False
    if isinstance(value, (tuple, list)):
        return all(isinstance(item, _SETTING_TYPES) for item in value)
    return isinstance(value, _SETTING_TYPES)


def kind_names(signatures: list[Hashable]) -> list[str]:
    """A kind name for every block: ``block`` where all are equal, else ``block0``, ``block1``, ... by first use."""
    order = {key: place for place, key in enumerate(dict.fromkeys(signatures))}
    if len(order) <= 1:
        return ["block"] * len(signatures)
    return [f"block{order[key]}" for key in signatures]


def unit_paths(model: nn.Module, blocks: list[str]) -> list[str]:
    """The blocks, and the outermost modules that hold none and can run, in registration order; shared modules once."""
    chosen = set(blocks)

    def walk(module: nn.Module, path: str) -> list[str]:
        if path in chosen:
            return [path]
        if (
            path
            and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
            and not any(inside(block, path) for block in blocks)
        ):
            return [path]
        return [unit for name, child in module.named_children() for unit in walk(child, f"{path}.{name}".lstrip("."))]

    first: dict[int, str] = {}
    for path in walk(model, ""):
        first.setdefault(id(model.get_submodule(path)), path)
    return list(first.values())
