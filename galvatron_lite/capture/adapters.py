"""Freeze parameters of a model, and add low-rank adapters, before it is captured."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from galvatron_lite.model.blocks import find_blocks
from galvatron_lite.model.trace.flow import at
from galvatron_lite.model.trainable import Trainable


class Adapter(nn.Module):
    """A linear layer plus the scaled product of its input with two small matrices (arXiv:2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_down = nn.Linear(base.in_features, rank, bias=False).to(base.weight)
        self.lora_up = nn.Linear(rank, base.out_features, bias=False).to(base.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add the adapter's output to the layer's."""
        return torch.add(self.base(hidden), 2.0 * self.lora_up(self.lora_down(hidden)))


def make_trainable(model: nn.Module, trainable: Trainable | None) -> nn.Module:
    """Change a model in place so that only some parameters train; patterns match names of parameters and modules.

    Raises:
        InputError: a pattern matches nothing, or no linear layer gets an adapter.
    """
    if trainable is None:
        return model
    names = []
    for name, parameter in model.named_parameters():
        names.append(name)
        if trainable.freezes(name):
            parameter.requires_grad_(False)
    blocks = find_blocks(model) if trainable.rank else []
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    adapted = [path for path in linear if trainable.adapts(path) and any(at(path, block) for block in blocks)]
    trainable.check(names, len(adapted))
    for path in adapted:
        parent, _, leaf = path.rpartition(".")
        layer = model.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        setattr(model.get_submodule(parent), leaf, Adapter(layer, trainable.rank))
    return model
