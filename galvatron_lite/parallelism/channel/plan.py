"""How the channels of a layer are shared, as a value: what ``infer`` finds and ``apply`` carries out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from galvatron_lite.parallelism.channel.parts import Part


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """How a layer's channels are shared.

    Attributes:
        by: ``filters`` or ``channels``; see ``channel.parts``.
        degree: devices that share them.
        parts: what a device does of each convolution and linear that is split, by its path in the layer: ``FILTERS``
            (what it makes is gathered where it must be whole), ``CHANNELS``, ``SCATTERED`` or ``SHARED``.
        partial: names of parameters that stay whole and meet shares: each device has a part of their gradients. By
            ``channels`` all that stays whole is so, named or not.
        inputs: channels of the pictures that enter, in order, by ``channels``.
        outputs: channels of the pictures that leave, likewise.
    """

    by: str
    degree: int
    parts: Mapping[str, Part] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
