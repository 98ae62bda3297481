"""Seconds of convolutions by shape and memory layout.

A dense convolution is an implicit matrix product of output pixels x (input channels x kernel) x output channels
(Chetlur et al. 2014, arXiv:1410.0759, section 3), and so are the gradients of its input and of its weights. Tensor
cores work in tiles: output channels are padded to 32, 64 or 128, of which the wider ones run faster, and the inner
extent to 32 (NVIDIA, "Convolutional Layers User's Guide", sections on channels and tile quantisation). They read
channels last; a picture that lies channels first is converted on its way in and out (the same guide, "Tensor
Layouts"). Nothing runs faster than its bytes can be moved.

Grouped convolutions fill such tiles badly; how badly depends on the kernels that cuDNN has for a layout
(``MemoryLayout``). Depthwise ones do not use tensor cores at all: they read and write memory, the gradient of the
weights more than once (Lu et al. 2021, arXiv:2104.02636), and work at a small share of the fp32 units' rate.

Figures marked [Empirical] were fitted on published runs of half of the networks (even CRC-32 of the name) and tried on
the other half.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

from galvatron_lite.model.graph import Operator
from galvatron_lite.model.sides import sides_of
from galvatron_lite.profiler.roofline_machine import Machine, Seconds, stream

TILES = ((128, 1.0), (64, 0.9), (32, 0.75))
"""Output channels of a tile and its rate beside the widest's; order after the guide, rates [Empirical]."""

INNER = 32
"""Inner items that are computed at once."""

RAMP = 64
"""[Empirical] inner items that filling the pipeline and writing a tile cost."""

DEPTHWISE = (1.38, 3.6)
"""[Empirical] times a depthwise convolution moves its input and output, forward and backward: an RTX 3090 under
PyTorch 1.12, either layout (github.com/huggingface/pytorch-image-models, results/benchmark-train-amp-*)."""

DEPTHWISE_RATE = 0.09
"""[Empirical] share of fp32 peak at which depthwise kernels work besides, same runs (kernels of 3 x 3 to 7 x 7)."""


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """How cuDNN's 16-bit kernels serve a memory layout. [Empirical], from the same runs as ``DEPTHWISE``."""

    conversions: float  # times input and output are moved besides, in each of the three products
    grouped: float  # rate of grouped convolutions beside dense ones
    width: float  # channels a group at which that rate is reached; narrower groups are padded to it
    even: int = 1  # groups must come in multiples of this for that rate; 1: any number
    uneven: float = 1.0  # rate of other grouped convolutions
    uneven_ramp: float = 0.0  # input channels a group at which they reach half of it


FIRST = MemoryLayout(conversions=2.0, grouped=0.37, width=33.0)
FULL = MemoryLayout(conversions=0.0, grouped=0.37, width=33.0)
# Grouped: chosen by hand on half of the networks of DeepLearningExamples on A100 and V100, checked on the others.
LAST = MemoryLayout(conversions=0.0, grouped=0.11, width=4.0, even=32, uneven=0.074, uneven_ramp=38.0)
"""16 bits and TF32 channels first; fp32, and TF32 channels last, which need no conversion; 16 bits channels last."""


def convolution(machine: Machine, operator: Operator, samples: float, shared: int) -> Seconds:
    """Forward and backward seconds of a convolution."""
    inputs, outputs, groups = operator.shape[:3]
    kernel = prod(side.kernel for side in sides_of(operator))
    # outputs are what the FLOPs say: padding is not in the shape
    pixels = operator.flops / (2 * (inputs // groups) * outputs * kernel) * samples
    seconds = stream(machine, (operator.moved * samples + operator.weight_bytes) / shared)
    if groups > 1 and inputs == groups:
        return _depthwise(machine, operator, samples, seconds)
    layout = _layout(machine, operator.channels_last)
    if groups > 1:
        rate = _grouped_rate(layout, inputs // groups, groups) * _peak(machine)
        work = operator.flops * samples / shared / rate
        return _sums(operator, layout, (work, work, work), seconds)
    rate, columns = _peak(machine), outputs / shared
    forward = _padded(kernel * inputs) * _columns(columns)
    to_input = _padded(kernel * outputs / shared) * _columns(inputs)
    to_weight = _columns(kernel * inputs) * ceil(columns / INNER) * INNER
    unit = 2 * pixels / rate * _waves(machine, pixels, columns)
    if machine.precision == "fp32" and _is_winograd(operator):
        unit /= machine.stack.winograd
    if len(sides_of(operator)) == 3:
        unit /= machine.stack.volumes
    return _sums(operator, layout, (forward * unit, to_input * unit, to_weight * unit), seconds)


def _layout(machine: Machine, last: bool) -> MemoryLayout:
    if last:
        return LAST if machine.item_bytes <= 2 else FULL
    return FIRST if machine.item_bytes <= 2 or machine.precision == "tf32" else FULL


def _is_winograd(operator: Operator) -> bool:
    """Whether Winograd's algorithm serves a dense convolution: 3 x 3, one pixel further each time."""
    sides = sides_of(operator)
    return len(sides) == 2 and all(side.kernel == 3 and side.stride == side.dilation == 1 for side in sides)


def _sums(operator: Operator, layout: MemoryLayout, work: tuple[float, float, float], seconds: float) -> Seconds:
    """The three products, each bound by work or bytes, conversions added; no input gradient for the first layer."""
    forward, to_input, to_weight = (max(part, seconds) + layout.conversions * seconds for part in work)
    if not operator.backward_flops:
        return Seconds(forward, 0.0)
    return Seconds(forward, to_weight + (to_input if operator.backward_flops > operator.flops else 0.0))


def _depthwise(machine: Machine, operator: Operator, samples: float, seconds: float) -> Seconds:
    """Bytes and work add up: such kernels do not hide one behind the other."""
    work = operator.flops * samples / (machine.device.peak.get("fp32", machine.peak) * DEPTHWISE_RATE)
    forward, backward = DEPTHWISE[0] * seconds + work, DEPTHWISE[1] * seconds + 2 * work
    return Seconds(forward, backward if operator.backward_flops else 0.0)


@lru_cache(maxsize=4096)
def _grouped_rate(layout: MemoryLayout, channels: int, groups: int) -> float:
    """Of the dense rate, by channels a group and number of groups."""
    if groups % layout.even:
        return layout.uneven * channels / (channels + layout.uneven_ramp)
    return layout.grouped * min(1.0, channels / layout.width)


@lru_cache(maxsize=4096)
def _padded(inner: float) -> float:
    return ceil(inner / INNER) * INNER + RAMP


@lru_cache(maxsize=4096)
def _columns(columns: float) -> float:
    """Output channels in the cheapest tiles, in units of the widest tile's rate."""
    return min(ceil(columns / tile) * tile / rate for tile, rate in TILES)


def _waves(machine: Machine, pixels: float, columns: float) -> float:
    """Whole waves of tiles beside the share that is filled; fewer tiles than units are split along the inner extent."""
    tiles = ceil(pixels / TILES[0][0]) * ceil(columns / TILES[0][0])
    units = machine.device.units
    return ceil(tiles / units) * units / tiles if tiles > units else 1.0


def _peak(machine: Machine) -> float:
    """FLOP/s of dense convolutions in full tiles under this software; where no share is known, matmuls' times 3/4."""
    shares = machine.constants.convolution
    name = {4: "fp32"}.get(machine.item_bytes, "bf16")
    share = shares.get(machine.precision, shares.get(name))
    return machine.wide * share / machine.stack.matmul if share else 0.75 * machine.other.unit * machine.device.units
