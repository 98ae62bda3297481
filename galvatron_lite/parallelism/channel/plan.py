"""How the channels of a layer are shared, as a value: what ``infer`` finds and ``apply`` carries out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from galvatron_lite.parallelism.channel.parts import OperatorPart


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """How a layer's channels are shared."""

    by: str  # ``filters`` or ``channels``; see ``channel.parts``
    degree: int  # devices that share them
    # what a device does of each convolution and linear that is split, by its path in the layer: ``FILTERS`` (what it
    # makes is gathered where it must be whole), ``CHANNELS``, ``SCATTERED`` or ``SHARED``
    parts: Mapping[str, OperatorPart] = field(default_factory=dict)
    # names of parameters that stay whole and meet shares: each device has a part of their gradients. By ``channels``
    # all that stays whole is so, named or not
    partial: frozenset[str] = frozenset()
    inputs: tuple[int, ...] = ()  # channels of the pictures that enter, in order, by ``channels``
    outputs: tuple[int, ...] = ()  # channels of the pictures that leave, likewise
