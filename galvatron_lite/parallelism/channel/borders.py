"""What enters and leaves a layer whose channels are shared: plain tensors outside, shares that know it inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.channel.nests import map_tensors
from galvatron_lite.parallelism.channel.split import ChannelSharing
from galvatron_lite.parallelism.cuts.tensor import Cut, cut_tensor, cut_tensors, cuts_of, local_of, uncut

CHANNELS = 1
"""Dim of the channels of what enters and leaves."""


def is_shared(tensor: Tensor) -> bool:
    """Whether a tensor that enters or leaves by ``channels`` is a picture: numbers for samples and channels."""
    return tensor.is_floating_point() and tensor.dim() > CHANNELS


def enter_layer(value: Any, sharing: ChannelSharing, extents: Sequence[int]) -> Any:
    """Arguments as the layer's inside sees them.

    Args:
        value: a nest of arguments. By ``filters`` they are whole; by ``channels`` pictures are this device's shares.
        sharing: who shares.
        extents: channels of the pictures, in order.

    Raises:
        InputError: more or fewer pictures than extents; a share of another length.
    """
    if sharing.by == "filters":
        return value
    channels = iter(extents)

    def entered(tensor: Tensor) -> Tensor:
        if not is_shared(tensor):
            return tensor
        cut = Cut(CHANNELS, next(channels, 0), sharing.line)
        # an alias: what is outside stays plain
        return cut_tensor(tensor.view_as(tensor), (cut,), sharing.rules)

    return map_tensors(value, entered)


def leave_layer(value: Any, sharing: ChannelSharing) -> Any:
    """What a layer returns, as plain tensors: whole by ``filters``, by ``channels`` shares of what is returned.

    Raises:
        InputError: by ``channels`` something that has no channels is returned.
    """
    if sharing.by == "filters":
        shared = next(cut_tensors(value), None) is not None
        return map_tensors(value, sharing.gather) if shared else value
    return map_tensors(value, lambda tensor: _left(tensor, sharing))


def _left(tensor: Tensor, sharing: ChannelSharing) -> Tensor:
    if [cut.dim for cut in cuts_of(tensor)] == [CHANNELS]:
        # itself, no view: ZeRO's hooks on it must outlast what code behind changes in place
        return uncut(tensor)
    if not is_shared(tensor):
        remedy = "It has no channels that devices could share: keep the layer whole, or share its filters."
        raise InputError("result of a layer with shared channels", tuple(tensor.shape), remedy)
    return local_of(sharing.share(sharing.gather(tensor), CHANNELS))
