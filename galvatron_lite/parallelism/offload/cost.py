"""Offload: optimizer states, or activations between forward and backward, are in host memory.

States (ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840, sections 4 and 5): the host keeps and updates the optimizer
states of the device's shard. Once a step the reduced gradients are copied to the host during the last backward, and the
updated parameters are copied back, tile by tile during the update of later tiles (section 5.1), so that the longer of
update and copy counts. Parameters and gradients stay on the device. The bandwidth of host memory bounds the update, a
pass over the states (section 5.1: CPU-Adam reaches this bound).

Activations (vDNN, Rhu et al. 2016, arXiv:1602.08124; torchtune's and Megatron-Core's CPU offloading): what a layer
saves is copied to the host during its forward, and back during the backward of the next layer. Copy engines do not slow
down compute, so only the time beyond the layer's compute counts.

Each device has a full-duplex link to its host. Devices of a node share the bandwidth of host memory evenly
(``Device.host_memory_bandwidth``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from galvatron_lite.arrays import Flag, Real, is_option, largest, where
from galvatron_lite.cluster.cluster import Device
from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.base import (
    AvailableDevices,
    Chosen,
    Dimension,
    DimensionContext,
    LayerWork,
    StrategyField,
    sample_degree,
    slice_degree,
)
from galvatron_lite.parallelism.ranks import Either
from galvatron_lite.parallelism.strategy import Offload, Strategy


@dataclass(frozen=True, slots=True)
class OffloadDimension(Dimension):
    """What is kept in host memory."""

    name: str = "offload"
    degree: str = ""

    fields = (
        StrategyField("offload", "offload", (), "none, states, activations or all",
                      {**{choice.value: choice for choice in Offload},
                       "off": Offload.NONE, "on": Offload.ALL, "optimizer": Offload.STATES}),
    )  # fmt: skip
    examples = "offload, offload-states, offload-activations"

    def word(self, strategy: Strategy) -> str:
        """``offload``, ``offload-states``, ``offload-activations``."""
        if strategy.offload is Offload.NONE:
            return ""
        return "offload" + ("" if strategy.offload is Offload.ALL else f"-{strategy.offload.value}")

    def in_words(self, strategy: Strategy) -> str:
        """See ``Dimension.in_words``."""
        if strategy.offload is Offload.NONE:
            return ""
        kept = "states and activations" if strategy.offload is Offload.ALL else strategy.offload.value
        return f"{kept} in host memory"

    def read(self, word: str) -> dict[str, object] | None:
        """See ``word``."""
        kept = {"offload": Offload.ALL, "offload-states": Offload.STATES, "offload-activations": Offload.ACTIVATIONS}
        return {"offload": kept[word]} if word in kept else None

    def features(self, strategy: Strategy) -> set[str]:
        """See ``Dimension.features``."""
        return set() if strategy.offload is Offload.NONE else {f"offload of {strategy.offload.value}"}

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:  # noqa: ARG002
        """None, states (of a layer with parameters), activations (of a layer that saves some), or both."""
        states, saved = kind.trainable > 0 or kind.shares, any(size.total for size in kind.kept.values())
        legal = {
            Offload.NONE: True,
            Offload.STATES: states,
            Offload.ACTIVATIONS: saved,
            Offload.ALL: states and saved,
        }
        return [{"offload": choice} for choice, is_legal in legal.items() if is_legal]

    def allows(self, kind: LayerKind, chosen: Chosen, room: AvailableDevices) -> bool:  # noqa: ARG002
        """Sensible: only what has no copy on another device of the stage.

        To shard copies (ZeRO over all ranks, sequence parallelism) saves as much memory over faster links. Spatial and
        channel parallelism shard the activations of a layer already.
        """
        offload = chosen["offload"]
        if room.node is None or offload is Offload.NONE:
            return True
        if slice_degree(chosen) * sample_degree(chosen) > chosen["tensor"] * chosen["context"]:
            return False
        states_sharded = chosen["data"] == 1 and (chosen["context"] == 1 or chosen["zero_stage"] > 0)
        activations_sharded = chosen["tensor"] == 1 or chosen["sequence_parallel"]
        return (states_sharded or offload is Offload.ACTIVATIONS) and (activations_sharded or offload is Offload.STATES)

    def runs_on(self, device: Device, kind: LayerKind, strategy: Either) -> Flag:  # noqa: ARG002
        """Devices with a link to the host of known bandwidth."""
        return is_option(strategy.offload, Offload.NONE) | (device.host_bandwidth > 0)

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:  # noqa: ARG002
        """States or activations in host memory; must run last, when the device's shard of the states is final."""
        states = where(strategy.offloads_states, work.state_items, 0.0)
        return replace(work, host_items=states, host_kept=where(strategy.offloads_activations, 1.0, 0.0))


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """Seconds that copies to and from the host, and the update there, add to a layer; arrays for many strategies."""

    forward: Real  # a micro-batch, beyond the layer's forward compute
    backward: Real  # a micro-batch, beyond the layer's backward compute
    step: Real  # a step, beyond the last backward
    update: Real  # a step


def host_traffic(
    device: Device, work: LayerWork, seconds: tuple[Real, Real], kept: Real, item: HostItem
) -> HostTraffic:
    """Compute what offloading adds to the seconds of a layer; zeros if nothing is offloaded.

    Args:
        device: the type of device, with a link to the host (``host_bandwidth`` > 0).
        work: of the layer.
        seconds: the layer's compute in forward and in backward (with recomputation).
        kept: bytes that the layer saves from forward to backward.
        item: bytes of one parameter item.
    """
    forward, backward = seconds
    link = device.host_bandwidth or 1.0
    copied = work.host_kept * kept / link
    gradients = work.host_items * item.gradient / link
    updated = work.host_items * item.updated / (REACHED * device.host_memory_bandwidth or 1.0)
    return HostTraffic(
        largest(copied - forward, 0.0),
        largest(copied - backward, 0.0),
        largest(gradients - backward, 0.0),
        largest(updated, work.host_items * item.parameter / link),
    )


REACHED = 0.45
"""Share of the bandwidth of host memory that an update reaches: ZeRO-Offload's CPU-Adam takes 0.25 s for a billion fp32
items (28 bytes each) on a DGX-2 (2 x 6 DDR4-2666: 256 GB/s; table 4)."""


@dataclass(frozen=True, slots=True)
class HostItem:
    """Bytes of one parameter item."""

    gradient: int  # copied to the host
    parameter: int  # copied to the device
    state: int  # of the optimizer, at rest

    @property
    def updated(self) -> int:
        """Bytes that an update reads (states, gradient) and writes (states, parameter) in host memory."""
        return 2 * self.state + self.gradient + self.parameter
