"""A convolution or linear that works on shares of channels: its weights sliced in place, its forward replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.channel.functions import gather_complete, scatter_sums
from galvatron_lite.parallelism.channel.modules import (
    Channels,
    Weighted,
    along_channels,
    channel_dim,
    channels_of_module,
    run_with,
)
from galvatron_lite.parallelism.channel.parts import OperatorPart
from galvatron_lite.parallelism.cuts.functions import enter, gather_cuts, slice_of
from galvatron_lite.parallelism.cuts.line import Line
from galvatron_lite.parallelism.cuts.tensor import Cut, Rules, cut_tensor, cuts_of, local_of
from galvatron_lite.parallelism.tensor.apply import Shards, slice_parameter
from galvatron_lite.parallelism.tensor.functions import reduce_from_group
from galvatron_lite.parallelism.tensor.shards import ParameterShard, Placement


@dataclass(frozen=True, slots=True)
class ChannelSharing:
    """Who shares the channels of a layer, and how."""

    by: str  # ``filters`` or ``channels``
    line: Line  # the devices
    rules: Rules  # what functions do with shares

    @property
    def is_complete(self) -> bool:
        """Whether the gradient of what is whole is complete on every device (else: a part)."""
        return self.by == "filters"

    def gather(self, tensor: Tensor) -> Tensor:
        """The whole of a tensor."""
        return gather_complete(tensor) if self.is_complete else gather_cuts(tensor)

    def share(self, tensor: Tensor, dim: int) -> Tensor:
        """The own share along ``dim`` of a whole tensor."""
        entered = enter(tensor, (self.line,)) if self.is_complete else tensor
        return slice_of(entered, (Cut(dim, tensor.shape[dim], self.line),), self.rules)


def split_part(channels: Channels, by: str, is_shared: bool, degree: int) -> OperatorPart:
    """What a device does of a convolution or linear.

    Args:
        channels: of the module.
        by: ``filters`` or ``channels``.
        is_shared: whether what enters is shared by channels.
        degree: devices that share them.
    """
    if channels.groups > 1:
        return OperatorPart.SHARED if is_shared and channels.shares_groups(degree) else OperatorPart.WHOLE
    if by == "channels":
        return OperatorPart.SCATTERED if min(channels.inputs, channels.outputs) >= degree else OperatorPart.WHOLE
    if is_shared:
        return OperatorPart.CHANNELS
    return OperatorPart.FILTERS if channels.outputs >= degree else OperatorPart.WHOLE


def split_module(module: Weighted, part: OperatorPart, sharing: ChannelSharing) -> Shards:
    """Slice a module's weight in place and make it work on shares.

    Returns:
        How its parameters lie in the whole ones, by their identity.
    """
    channels, line = channels_of_module(module), sharing.line
    dim, extent = _sliced_dim(channels, part)
    shards: Shards = {}
    slice_parameter(module.weight, dim, (extent,), line, shards)
    if module.bias is not None:
        summed = part is OperatorPart.CHANNELS
        placement = Placement.REPLICATED if summed else Placement.PARTIAL
        shards[id(module.bias)] = ParameterShard(placement, tuple(module.bias.shape), line.size, line.rank)
    module.forward = partial(_FORWARDS[part], module, channels, sharing)  # type: ignore[method-assign]
    return shards


def _sliced_dim(channels: Channels, part: OperatorPart) -> tuple[int, int]:
    """Dim of the weight that is sliced, and how long it is."""
    match part:
        case OperatorPart.FILTERS:
            return channels.output_dim, channels.outputs
        case OperatorPart.CHANNELS | OperatorPart.SCATTERED:
            return channels.input_dim, channels.inputs
        case OperatorPart.SHARED:
            return 0, (channels.inputs, channels.outputs)[channels.output_dim == 0]
    raise InputError("part", part, "Split what is made, what enters, or groups.")


def _shared(tensor: Tensor, dim: int, sharing: ChannelSharing) -> Tensor:
    """This device's share along ``dim`` of what enters, as a plain tensor, however it comes."""
    if any(cut.dim != dim for cut in cuts_of(tensor)):
        tensor = sharing.gather(tensor)
    return local_of(tensor if cuts_of(tensor) else sharing.share(tensor, dim))


def _filters(module: Weighted, channels: Channels, sharing: ChannelSharing, tensor: Tensor) -> Tensor:
    entered = enter(sharing.gather(tensor), (sharing.line,))
    dim = channel_dim(module, entered)
    made = Cut(dim, channels.outputs, sharing.line)
    local = run_with(module, entered, _own_bias(module, made), 1)
    return cut_tensor(local, (made,), sharing.rules)


def _channels(module: Weighted, channels: Channels, sharing: ChannelSharing, tensor: Tensor) -> Tensor:  # noqa: ARG001
    local = _shared(tensor, channel_dim(module, tensor), sharing)
    summed = reduce_from_group(run_with(module, local, None, 1), sharing.line)
    return summed if module.bias is None else summed + along_channels(module.bias, module, summed).to(summed.dtype)


def _scattered(module: Weighted, channels: Channels, sharing: ChannelSharing, tensor: Tensor) -> Tensor:
    dim = channel_dim(module, tensor)
    local = _shared(tensor, dim, sharing)
    made = Cut(dim, channels.outputs, sharing.line)
    sums = scatter_sums(run_with(module, local, None, 1), made, sharing.rules)
    bias = _own_bias(module, made)
    if bias is None:
        return sums
    plain = local_of(sums)
    return cut_tensor(plain + along_channels(bias, module, plain).to(plain.dtype), (made,), sharing.rules)


def _groups(module: Weighted, channels: Channels, sharing: ChannelSharing, tensor: Tensor) -> Tensor:
    dim = channel_dim(module, tensor)
    local = _shared(tensor, dim, sharing)
    made = Cut(dim, channels.outputs, sharing.line)
    groups = channels.groups * local.shape[dim] // channels.inputs
    return cut_tensor(run_with(module, local, _own_bias(module, made), groups), (made,), sharing.rules)


def _own_bias(module: Weighted, cut: Cut) -> Tensor | None:
    return None if module.bias is None else module.bias.narrow(0, cut.start, cut.length)


_FORWARDS: dict[OperatorPart, Callable[[Weighted, Channels, ChannelSharing, Tensor], Tensor]] = {
    OperatorPart.FILTERS: _filters,
    OperatorPart.CHANNELS: _channels,
    OperatorPart.SCATTERED: _scattered,
    OperatorPart.SHARED: _groups,
}
