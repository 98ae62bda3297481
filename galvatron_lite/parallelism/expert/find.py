"""Where a block's experts are, by structure: no name of a model or a class is known here."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

NOT_SPREAD = "so its experts cannot be spread"


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of one mixture.

    Attributes:
        path: of the module that holds them, inside the block.
        experts: how many.
        parameters: names, inside that module, of those that hold a slice for each expert along their first dim.
        reason: why they cannot be spread; empty where they can.
    """

    path: str
    experts: int
    parameters: tuple[str, ...]
    reason: str = ""


def find_mixtures(block: nn.Module) -> tuple[Mixture, ...]:
    """The mixtures inside a block, in order.

    Stacked experts: a module all of whose own parameters have the same first extent, one of them at least three dims
    (experts, ...), and whose forward takes hidden states (tokens, hidden), the numbers of the chosen experts and their
    weights (tokens, choices), as all mixtures of transformers 5 have it.
    """
    return tuple(_stacked(block))


def _stacked(block: nn.Module) -> Iterator[Mixture]:
    for path, module in block.named_modules():
        own = dict(module.named_parameters(recurse=False))
        extents = {parameter.shape[0] for parameter in own.values() if parameter.dim() > 1}
        flat = any(parameter.dim() < 2 for parameter in own.values())
        if len(extents) != 1 or flat or max(parameter.dim() for parameter in own.values()) != 3:
            continue
        (experts,) = extents
        if experts > 1:
            yield Mixture(path, experts, tuple(own), _unlike(module))


def _unlike(module: nn.Module) -> str:
    """Why a module with stacked experts is not called as routed ones are."""
    taken = inspect.signature(module.forward).parameters.values()
    needed = [one for one in taken if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if len(needed) == 3:
        return ""
    names = ", ".join(one.name for one in needed)
    return f"{type(module).__name__} takes ({names}), not hidden states, chosen experts and their weights, {NOT_SPREAD}"
