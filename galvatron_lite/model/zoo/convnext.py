"""ConvNeXt: depthwise convolutions and per-pixel MLPs, normalised over channels.

Liu et al. 2022 (arXiv:2201.03545, section 3); no stochastic depth.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.model.shapes.fields import ConvNextShape
from galvatron_lite.model.zoo.convnets import ImageClassifier


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of every pixel of (samples, channels, height, width)."""

    def forward(self, x: Tensor) -> Tensor:
        """Channels last, normalise, channels first again."""
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, norm, MLP of four times the width, learned scale, residual; keeps the shape."""

    def __init__(self, width: int, kernel: int, scale: float) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), scale))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Mix pixels, then channels, and add."""
        y = self.dwconv(x).permute(0, 2, 3, 1)
        y = self.pwconv2(self.act(self.pwconv1(self.norm(y))))
        out: Tensor = x + (self.gamma * y).permute(0, 3, 1, 2)
        return out


class ConvNeXt(ImageClassifier):
    """A ConvNeXt.

    Args:
        config: its shape.
        scale: first value of the learned factor on each block's result.
    """

    def __init__(self, config: ConvNextShape, scale: float = 1e-6) -> None:
        super().__init__(config)
        widths = config.widths
        self.stem = nn.Sequential(nn.Conv2d(config.channels, widths[0], 4, 4), LayerNorm2d(widths[0], eps=1e-6))
        self.downsamples = nn.ModuleList(
            nn.Sequential(LayerNorm2d(inner, eps=1e-6), nn.Conv2d(inner, outer, 2, 2))
            for inner, outer in pairwise(widths)
        )
        self.stages = nn.ModuleList(
            nn.Sequential(*(ConvNeXtBlock(width, config.kernel, scale) for _ in range(depth)))
            for depth, width in zip(config.depths, widths, strict=True)
        )
        self.norm = nn.LayerNorm(widths[-1], eps=1e-6)
        self.head = nn.Linear(widths[-1], config.classes)
        self.apply(self._init_weights)

    def logits(self, pictures: Tensor) -> Tensor:
        """Logits (samples, classes)."""
        x = self.stem(pictures)
        for stage, blocks in enumerate(self.stages):
            x = blocks(x if stage == 0 else self.downsamples[stage - 1](x))
        logits: Tensor = self.head(self.norm(x.mean([-2, -1])))
        return logits

    def _init_weights(self, module: nn.Module) -> None:
        # the name by which a model on the meta device gets its initial values, too
        if isinstance(module, (nn.Conv2d, nn.Linear)) and module.bias is not None:
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        if isinstance(module, ConvNeXtBlock):
            nn.init.constant_(module.gamma, module.scale)
