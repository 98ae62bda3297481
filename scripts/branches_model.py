"""Two convolution networks that read the same picture and know nothing of each other, for ``scripts/branches``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

CHANNELS = 4


@dataclass(frozen=True)
class Size:
    """Of a pair of encoder-decoders."""

    name: str  # for the table
    side: int  # pixels along a side of a picture
    widths: tuple[int, int]  # channels inside the first and the second
    depths: tuple[int, int]  # convolutions inside the first and the second
    samples: int = 1  # of a batch


SIZES = (
    Size("1 : 1", 224, (48, 48), (4, 4)),
    Size("2 : 3", 224, (48, 48), (6, 4)),
    Size("1 : 2", 224, (48, 48), (8, 4)),
    Size("1 : 4", 224, (48, 48), (12, 2)),
)
"""Named by about how their costs are to each other."""
CHOICES = (
    Size("tiny", 8, (4, 4), (1, 1)),
    Size("small", 16, (8, 8), (2, 2)),
    Size("large", 128, (48, 48), (4, 4)),
    Size("tiny, 8 samples", 8, (4, 4), (1, 1), 8),
    Size("unlike, 8 samples", 48, (48, 24), (4, 1), 8),
)
"""From too small to be worth devices of their own to large enough."""


def network(width: int, depth: int) -> nn.Sequential:
    """An encoder-decoder with so many convolutions of so many channels."""
    inner = [layer for _ in range(depth) for layer in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(CHANNELS, width, 3, 2, 1), nn.ReLU(), *inner, nn.ConvTranspose2d(width, 1, 2, 2))


class Pair(nn.Module):
    """Both networks, joined by a loss; without targets their outputs."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.first, self.second = (network(*shape) for shape in zip(size.widths, size.depths, strict=True))

    def forward(self, pictures: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The loss, or both pictures."""
        made = self.first(pictures), self.second(pictures)
        return made if targets is None else (made[0] - targets).square().mean() + (made[1] + targets).square().mean()


def make(size: Size) -> tuple[Pair, dict[str, Tensor]]:
    """A model and a batch; the same wherever it is called."""
    torch.manual_seed(0)
    model = Pair(size)
    shape = (size.samples, CHANNELS, size.side, size.side)
    return model, {"pictures": torch.randn(shape), "targets": torch.randn(size.samples, 1, size.side, size.side)}
