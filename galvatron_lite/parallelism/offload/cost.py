"""Offload: optimizer states, or activations between the passes, wait in host memory.

States (ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840, sections 4 and 5): the host keeps the optimizer's states of
what the device owns and updates them. Once a step the reduced gradients of those items go down, beside the last
backward that makes them, and the updated parameters come up, tile by tile beside the update of later tiles (section
5.1), so that the longer of update and copy counts. Parameters and gradients stay on the device; the update, a pass
over the states, is bound by the host's memory (its CPU-Adam reaches what that bandwidth allows, section 5.1).

Activations (vDNN, Rhu et al. 2016, arXiv:1602.08124; torchtune's and Megatron-Core's CPU offloading): what a layer
keeps goes down beside forward and comes up beside backward of the layer after it; copy engines carry it, so compute is
not slowed, and only what takes longer than the layer's own compute counts.

Links to the host are full duplex and each device has its own; devices of a node share the host's memory bandwidth,
of which a device has an even part (``Device.host_memory_bandwidth``).
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
    shared,
    sliced,
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
        """Nothing, states, activations or both; no states where there are no parameters, no activations where a layer
        keeps none."""
        states, kept = kind.trainable > 0, any(size.total for size in kind.kept.values())
        wanted = {Offload.NONE: True, Offload.STATES: states, Offload.ACTIVATIONS: kept, Offload.ALL: states and kept}
        return [{"offload": choice} for choice, there in wanted.items() if there]

    def allows(self, kind: LayerKind, chosen: Chosen, room: AvailableDevices) -> bool:  # noqa: ARG002
        """Sensible: only what no other device of the stage holds a copy of, for sharing copies out (ZeRO over all
        ranks, sequence parallelism) saves as much over quicker links. Not beside spatial or channel parallelism, which
        a layer takes to share out what would go to the host."""
        offload = chosen["offload"]
        if room.node is None or offload is Offload.NONE:
            return True
        if sliced(chosen) * shared(chosen) > chosen["tensor"] * chosen["context"]:
            return False
        sharded = chosen["data"] == 1 and (chosen["context"] == 1 or chosen["zero_stage"] > 0)
        single = chosen["tensor"] == 1 or chosen["sequence_parallel"]
        states, kept = offload is not Offload.ACTIVATIONS, offload is not Offload.STATES
        return (sharded or not states) and (single or not kept)

    def runs_on(self, device: Device, kind: LayerKind, strategy: Either) -> Flag:  # noqa: ARG002
        """Where the device's link to its host is known."""
        return is_option(strategy.offload, Offload.NONE) | (device.host_bandwidth > 0)

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:  # noqa: ARG002
        """Marks what lies in host memory; must run last, when it is known what the device owns."""
        states = where(strategy.offloads_states, work.state_items, 0.0)
        return replace(work, host_items=states, host_kept=where(strategy.offloads_activations, 1.0, 0.0))


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """Seconds of one layer's copies to and from the host, and of the update there; arrays for many strategies."""

    forward: Real  # forward, backward: a micro-batch, beyond the layer's own compute, which they run beside
    backward: Real
    step: Real  # once a step beyond the last backward
    update: Real  # once a step


def host_traffic(
    device: Device, work: LayerWork, seconds: tuple[Real, Real], kept: Real, item: HostItem
) -> HostTraffic:
    """What offloading adds to a layer's seconds; zeros where nothing is offloaded.

    Args:
        device: with its link to the host (``host_bandwidth`` > 0).
        work: of the layer.
        seconds: its compute in forward and in backward (with what is computed again).
        kept: bytes it keeps between the passes.
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
"""Share of host memory's bandwidth that an update reaches: ZeRO-Offload's CPU-Adam takes 0.25 s for a billion fp32
items (28 bytes each) on a DGX-2 (2 x 6 DDR4-2666: 256 GB/s; table 4)."""


@dataclass(frozen=True, slots=True)
class HostItem:
    """Bytes of one parameter item."""

    gradient: int  # that goes down
    parameter: int  # that comes up
    state: int  # of the optimizer, at rest

    @property
    def updated(self) -> int:
        """Bytes that pass through host memory in an update: states are read and written, the gradient read, the
        parameter written."""
        return 2 * self.state + self.gradient + self.parameter
