"""Where a block's experts are, by structure: no name of a model or a class is known here."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

NOT_SPREAD = "so its experts cannot be spread"


@dataclass(frozen=True, slots=True)
class BlockMixture:
    """The experts of one mixture."""

    path: str  # of the module that holds them, inside the block
    experts: int
    # names, inside that module, of those that hold a slice for each expert along their first dim
    parameters: tuple[str, ...]
    reason: str = ""  # why they cannot be spread; empty where they can


def find_mixtures(block: nn.Module) -> tuple[BlockMixture, ...]:
    """The mixtures inside a block, in order.

    Stacked experts: a module all of whose own parameters have the same first extent, one of them at least three dims
    (experts, ...), and whose forward takes hidden states (tokens, hidden), the numbers of the chosen experts and their
    weights (tokens, choices), as mixtures of transformers 5 have it. Experts that are modules of their own, equal ones
    in a list beside a linear with an output for each, are found to say why they are not spread.
    """
    return (*_stacked(block), *_listed(block))


def _stacked(block: nn.Module) -> Iterator[BlockMixture]:
    for path, module in block.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        if not parameters or type(module).__module__.startswith("torch.nn."):
            continue
        extents = {parameter.shape[0] for parameter in parameters.values() if parameter.dim() > 1}
        flat = any(parameter.dim() < 2 for parameter in parameters.values())
        if len(extents) != 1 or flat or max(parameter.dim() for parameter in parameters.values()) != 3:
            continue
        (experts,) = extents
        if experts > 1:
            yield BlockMixture(path, experts, tuple(parameters), _unlike(module))


def _listed(block: nn.Module) -> Iterator[BlockMixture]:
    for path, module in block.named_modules():
        parts = list(module.children())
        routers = {part.out_features for part in parts if isinstance(part, nn.Linear)}
        for name, experts in module.named_children():
            if isinstance(experts, nn.ModuleList) and len(experts) > 1 and len(experts) in routers and _equal(experts):
                full = f"{path}.{name}".lstrip(".")
                reason = (
                    f"the experts of {full} are modules of their own, which its code calls one by one; stack their "
                    "weights in one module that takes hidden states, chosen experts and their weights "
                    "(model.zoo.moe.Experts)"
                )
                yield BlockMixture(full, len(experts), (), reason)


def _equal(experts: nn.ModuleList) -> bool:
    """Whether modules have the same parameters by name and shape."""
    shapes = [[(name, tuple(one.shape)) for name, one in expert.named_parameters()] for expert in experts]
    return bool(shapes[0]) and all(shape == shapes[0] for shape in shapes)


def _unlike(module: nn.Module) -> str:
    """Why a module with stacked experts is not called as routed ones are."""
    taken = inspect.signature(module.forward).parameters.values()
    positional = [one for one in taken if one.kind is one.POSITIONAL_OR_KEYWORD]
    needed = [one for one in positional if one.default is one.empty]
    if len(needed) <= 3 <= len(positional):
        return ""
    names = ", ".join(one.name for one in needed)
    return f"{type(module).__name__} takes ({names}), not hidden states, chosen experts and their weights, {NOT_SPREAD}"
