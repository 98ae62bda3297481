"""The modules of a model that are looked at one by one: its blocks, and what runs beside them."""

from __future__ import annotations

from torch import nn

from galvatron_lite.model.discover_blocks import inside


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
