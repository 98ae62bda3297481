"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) in a few lines, for models whose other parameters are frozen."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

RANK = 4


class Adapter(nn.Module):
    """A frozen linear layer plus the product of two small matrices that train."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        device = base.weight.device
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False, device=device)
        self.up = nn.Linear(RANK, base.out_features, bias=False, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        adapted: Tensor = self.base(hidden) + 2.0 * self.up(self.down(hidden))
        return adapted


def with_adapters(model: nn.Module, targets: Collection[str]) -> nn.Module:
    """The model, changed in place: all of it frozen, adapters on linear layers of these names."""
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        parent, _, leaf = path.rpartition(".")
        if isinstance(module, nn.Linear) and leaf in targets:
            setattr(model.get_submodule(parent), leaf, Adapter(module))
    return model
