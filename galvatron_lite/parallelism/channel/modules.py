"""Convolutions and linears as modules with weights: their channels, and their work with weights of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Weighted = nn.Linear | Convolution | Transposed
"""What can be split."""

_FUNCTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: functional.linear,
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
    nn.ConvTranspose1d: functional.conv_transpose1d,
    nn.ConvTranspose2d: functional.conv_transpose2d,
    nn.ConvTranspose3d: functional.conv_transpose3d,
}


@dataclass(frozen=True, slots=True)
class Channels:
    """Channels of a convolution or linear, and the dims of its weight that hold them."""

    inputs: int  # channels that enter
    outputs: int  # channels that leave
    groups: int  # of the convolution; they follow one another along dim 0 of the weight
    input_dim: int  # of the weight
    output_dim: int  # of the weight

    def shares_groups(self, degree: int) -> bool:
        """Whether shares of the channels are whole groups: groups divide evenly, or each is one channel."""
        single = self.inputs == self.outputs == self.groups
        return self.groups >= degree and (single or self.groups % degree == 0)


def is_weighted(module: nn.Module) -> bool:
    """Whether a module is a convolution or linear as torch has it: forward not overridden, a plain weight."""
    kind = next((kind for kind in _FUNCTIONS if isinstance(module, kind)), None)
    if kind is None or type(module).forward is not kind.forward or "forward" in vars(module):
        return False
    return any(name == "weight" for name, _ in module.named_parameters(recurse=False))


def channels_of_module(module: Weighted) -> Channels:
    """The channels of a convolution or linear that has not been split."""
    if isinstance(module, nn.Linear):
        return Channels(module.in_features, module.out_features, 1, 1, 0)
    back = isinstance(module, Transposed)
    return Channels(module.in_channels, module.out_channels, module.groups, 1 - back, int(back))


def channel_dim(module: Weighted, tensor: Tensor) -> int:
    """Dim of the channels, counted from the front, in what enters or leaves a module."""
    return tensor.dim() - 1 if isinstance(module, nn.Linear) else 1


def takes_samples(module: Weighted, tensor: Tensor) -> bool:
    """Whether what enters has samples along dim 0, so that its channels are where they are looked for."""
    return tensor.dim() >= 2 if isinstance(module, nn.Linear) else tensor.dim() == module.weight.dim()


def run_with(module: Weighted, tensor: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """What a module does, with another bias and number of groups; the weight is what it holds now.

    Args:
        module: a convolution or linear.
        tensor: whatever share of its input fits the weight.
        bias: as long as its outputs.
        groups: that the weight holds.
    """
    function = next(one for kind, one in _FUNCTIONS.items() if isinstance(module, kind))
    if isinstance(module, nn.Linear):
        return function(tensor, module.weight, bias)
    if isinstance(module, Transposed):
        sides = (module.stride, module.padding, module.output_padding)
        return function(tensor, module.weight, bias, *sides, groups, module.dilation)
    padding = module.padding
    if module.padding_mode != "zeros":
        tensor, padding = functional.pad(tensor, _borders(module), module.padding_mode), "valid"
    return function(tensor, module.weight, bias, module.stride, padding, module.dilation, groups)


def _borders(module: Convolution) -> list[int]:
    """Padding as ``functional.pad`` wants it: before and after, the last side first."""
    if isinstance(module.padding, str):
        whole = [d * (k - 1) if module.padding == "same" else 0 for d, k in _sides(module)]
        both = [(total // 2, total - total // 2) for total in whole]
    else:
        both = [(side, side) for side in module.padding]
    return [items for pair in reversed(both) for items in pair]


def _sides(module: Convolution) -> Sequence[tuple[int, int]]:
    return list(zip(module.dilation, module.kernel_size, strict=True))


def along_channels(bias: Tensor, module: Weighted, output: Tensor) -> Tensor:
    """A bias in the shape in which it is added to an output."""
    if isinstance(module, nn.Linear):
        return bias
    return bias.view(-1, *[1] * (output.dim() - 2))
