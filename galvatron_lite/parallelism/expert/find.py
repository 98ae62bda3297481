"""Find the experts of a block by its structure, independent of names of models and classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

NOT_SPREAD = "so its experts cannot be spread"


@dataclass(frozen=True, slots=True)
class BlockMixture:
    """The experts of one mixture."""

    path: str  # of their module, inside the block
    experts: int
    parameters: tuple[str, ...]  # names, inside that module, of parameters stacked over experts along their first dim
    reason: str = ""  # why they cannot be spread; empty if they can


def find_mixtures(block: nn.Module) -> tuple[BlockMixture, ...]:
    """Return the mixtures inside a block, in order.

    Stacked experts are a module whose direct parameters have the same first extent and two or three dims (experts,
    ...), and whose forward takes hidden states (tokens, hidden), the indices of the chosen experts and their weights
    (tokens, choices), as in mixtures of transformers 5. Experts that are separate modules (equal ones in a list beside
    a linear with an output for each) are returned with the reason why they cannot be spread.
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
    shapes = [[(name, tuple(parameter.shape)) for name, parameter in expert.named_parameters()] for expert in experts]
    return bool(shapes[0]) and all(shape == shapes[0] for shape in shapes)


def _unlike(module: nn.Module) -> str:
    """Explain why stacked experts are not called with hidden states, indices and weights; empty if they are."""
    arguments = inspect.signature(module.forward).parameters.values()
    positional = [argument for argument in arguments if argument.kind is argument.POSITIONAL_OR_KEYWORD]
    required = [argument for argument in positional if argument.default is argument.empty]
    if len(required) <= 3 <= len(positional):
        return ""
    names = ", ".join(argument.name for argument in required)
    return f"{type(module).__name__} takes ({names}), not hidden states, chosen experts and their weights, {NOT_SPREAD}"
