"""Estimates the seconds of an operator on a device from its shape and the data sheet (roofline).

A matmul's output is cut into tiles that the device processes in waves of one tile for each multiprocessor; a partly
filled last wave takes as long as a full one (NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave
quantisation). The kernel library takes the cheapest tile. Nothing runs faster than its bytes can be moved or a kernel
can be launched.

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
from math import ceil, floor, prod

from galvatron_lite.model.graph import Operator, OperatorClass, Sharding
from galvatron_lite.model.sides import sides_of
from galvatron_lite.profiler import machine as constants
from galvatron_lite.profiler.machine import NARROW, Machine, Rates, Seconds, machine_of, stream

_ROW_SPLIT = frozenset(("out", "down", "projection", "o_proj", "down_proj", "c_proj", "o"))
"""Last parts of names of matmuls whose rows (inner extent) tensor parallelism divides."""


def matmul_seconds(machine: Machine, rows: float, inner: float, columns: float) -> float:
    """Return the seconds of one matmul (rows x inner) @ (inner x columns) in the precision of linear layers."""
    return matmul_at(machine.linear, rows, inner, columns)


@lru_cache(maxsize=1 << 17)
def matmul_at(rates: Rates, rows: float, inner: float, columns: float, groups: float = 1) -> float:
    """Return the seconds of a matmul, or of ``groups`` equal ones in one kernel whose tiles fill waves together."""
    moved = groups * (rows * inner + inner * columns + rows * columns) * rates.item_bytes
    compute = _compute_seconds(rates, rows, inner, columns, groups)
    return max(compute, rates.launch, rates.tail + moved / rates.bandwidth)


def _compute_seconds(rates: Rates, rows: float, inner: float, columns: float, groups: float) -> float:
    """Return the seconds of a matmul's FLOPs in the cheapest tile."""
    units, ramp = rates.units, constants.RAMP_INNER if rates.units > 1 else 0
    if not rates.gpu:
        size = constants.CPU_TILE
        tiles = groups * ceil(rows / size) * ceil(columns / size)
        return ceil(tiles / units) * (inner + ramp) * 2 * size * size / rates.unit
    best = float("inf")
    for tile_rows, tile_columns, rate in constants.GPU_TILES:
        tiles = groups * ceil(rows / tile_rows) * ceil(columns / tile_columns)
        flops = 2 * tile_rows * tile_columns / rate
        if tiles >= units:
            extent = ceil(tiles / units) * (inner + ramp)
        else:
            extent = min(ceil(tiles * split / units) * (inner / split + ramp) for split in constants.SPLITS)
        best = min(best, extent * flops)
    return best / rates.unit


def matmul(
    machine: Machine, operator: Operator, samples: float, shared: int, expert: int = 1, load: float = 1.0
) -> Seconds:
    """Return forward and backward of a matmul operator, all calls together.

    Backward is one matmul for the gradient of the input and one for that of the weights.

    Args:
        machine: the device.
        operator: the matmul.
        samples: samples on the device.
        shared: devices that divide the operator.
        expert: devices that its experts are spread over; each expert then sees that many times the rows.
        load: rows of the most loaded expert over the mean.
    """
    if not operator.weight_bytes:
        return _batched_matmul(machine, operator, samples, shared)
    rates = machine.linear if operator.precision in NARROW or not machine.narrow else machine.other
    rows, inner, columns = operator.shape[0] * samples, operator.shape[1], operator.shape[2]
    groups = max(1.0, operator.count / expert) if operator.count > 1 else 1
    rows *= operator.count / groups * (load if operator.count > 1 else 1)
    forward = backward = 0.0
    shapes = _matmul_shapes(operator, rows, inner, columns, shared)
    for m, k, n in shapes:
        slowdown = _misalignment(k, n, rates)
        forward += slowdown * matmul_at(rates, m, k, n, groups)
        backward += slowdown * (matmul_at(rates, m, n, k, groups) + matmul_at(rates, k, m, n, groups))
    calls = operator.flops / (2 * prod(operator.shape) * operator.count)
    # a frozen matmul, or one whose input needs no gradient, does less in backward
    share = operator.backward_flops / (2 * operator.flops) if operator.flops else 0.0
    forward, backward = calls * forward / len(shapes), calls * backward / len(shapes) * share
    # besides its two matmuls backward writes the bias's gradient and adds up the input gradients of sibling matmuls
    extra = (operator.backward_moved - 2 * operator.moved) * (samples / shared)
    if extra > 0 and operator.backward_flops:
        backward += stream(machine, extra)
    return Seconds(forward, backward)


def _matmul_shapes(
    operator: Operator, rows: float, inner: float, columns: float, shared: int
) -> tuple[tuple[float, float, float], ...]:
    """Return the shapes of a split matmul, columns or inner extent divided; both if its name does not tell."""
    if shared == 1:
        return ((rows, inner, columns),)
    if operator.sharding is not Sharding.TENSOR:
        return ((rows / shared, inner, columns),)
    by_columns, by_rows = (rows, inner, columns / shared), (rows, inner / shared, columns)
    last = operator.name.rpartition(".")[2]
    if last in _ROW_SPLIT:
        return (by_rows,)
    return (by_columns,) if last in constants.COLUMN_SPLIT else (by_columns, by_rows)


def _misalignment(inner: float, columns: float, rates: Rates) -> float:
    """Return the slowdown of 16-bit matmuls whose matrix rows do not begin at multiples of 16 bytes."""
    if not rates.gpu or rates.item_bytes != 2 or not (inner % 8 or columns % 8):
        return 1.0
    # an uneven split has shares of two sizes, a padded one only of one
    extents = [floor(inner), floor(columns), *([ceil(inner), ceil(columns)] if rates.uneven else [])]
    aligned = min(2 * (extent & -extent) for extent in extents)
    return constants.MISALIGNED.get(aligned, 1.0)


def _batched_matmul(machine: Machine, operator: Operator, samples: float, shared: int) -> Seconds:
    """Return the time of matmuls of two activations for each head (plain attention); rows include the heads."""
    rows, inner, columns = operator.shape[0] * samples / shared, operator.shape[1], operator.shape[2]
    rates, factor = machine.other, machine.stack.attention / machine.stack.matmul
    head_size = min(inner, columns)  # the other extent is the number of keys
    if _misalignment(head_size, head_size, rates) > 1:
        # Heads that do not begin at multiples of 16 bytes run on the fp32 units; an odd number of keys (197 of vision
        # transformers) does not matter. A model of BigScience on A100 takes 30 to 40 % longer with 128 heads of 108
        # than with 96 of 144 (github.com/bigscience-workshop/bigscience, train/tr11-176B-ml): its attention runs at
        # 17 TFLOP/s.
        plain = machine_of(machine.device, "fp32", machine.constants, machine.stack)
        rates = rates._replace(unit=min(plain.other.unit, rates.unit))
    calls = operator.flops / (2 * prod(operator.shape))
    floor = stream(machine, operator.moved * samples / shared / max(1, operator.count)) * max(1, operator.count)
    forward = max(factor * calls * matmul_at(rates, rows, inner, columns), floor)
    to_input = max(factor * calls * matmul_at(rates, rows, columns, inner), floor)
    return Seconds(forward, to_input + forward if operator.backward_flops else 0.0)


TILES = ((128, 1.0), (64, 0.9), (32, 0.75))
"""Output channels of a tile and its rate over the widest tile's; order after the guide, rates [Empirical]."""

INNER = 32  # inner items that are computed at once

RAMP = 64  # [Empirical] inner items' worth of filling the pipeline and writing a tile

DEPTHWISE = (1.38, 3.6)
"""[Empirical] times that a depthwise convolution moves its input and output in forward and in backward: an RTX 3090
under PyTorch 1.12, either layout (github.com/huggingface/pytorch-image-models, results/benchmark-train-amp-*)."""

DEPTHWISE_RATE = 0.09
"""[Empirical] share of fp32 peak that depthwise kernels reach, same runs (kernels of 3 x 3 to 7 x 7)."""


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """Rates of cuDNN's kernels in a memory layout. [Empirical], from the same runs as ``DEPTHWISE``."""

    conversions: float  # further times that input and output are moved, in each of the three products
    grouped: float  # rate of grouped convolutions over dense ones
    width: float  # channels of a group from which that rate is reached; narrower groups are padded to it
    even: int = 1  # the number of groups must be a multiple of this for that rate
    uneven: float = 1.0  # rate of other grouped convolutions
    uneven_ramp: float = 0.0  # input channels of a group at which they reach half of it
    volumes: float = 1.0  # rate of 3D convolutions over that of 2D ones


FIRST = MemoryLayout(conversions=2.0, grouped=0.37, width=33.0)
FULL = MemoryLayout(conversions=0.0, grouped=0.37, width=33.0)
# Grouped: chosen by hand on half of the networks of DeepLearningExamples on A100 and V100, checked on the others;
# volumes: 0.8 suits its nnU-Net under TensorFlow on A100, 0.7 on V100.
LAST = MemoryLayout(conversions=0.0, grouped=0.11, width=4.0, even=32, uneven=0.074, uneven_ramp=38.0, volumes=0.75)
"""16 bits and TF32 channels first; fp32, and TF32 channels last, which need no conversion; 16 bits channels last."""


def convolution(machine: Machine, operator: Operator, samples: float, shared: int) -> Seconds:
    """Return forward and backward seconds of a convolution, all calls together."""
    (inputs, outputs, groups), sides = operator.shape[:3], sides_of(operator)
    kernel = prod(side.kernel for side in sides)
    # the FLOPs tell the number of output pixels, as the shape does not include padding
    pixels = operator.flops / (2 * (inputs // groups) * outputs * kernel) * samples
    seconds = stream(machine, (operator.moved * samples + operator.weight_bytes) / shared)
    if groups > 1 and inputs == groups:  # depthwise kernels do not overlap memory traffic with compute
        work = operator.flops * samples / (machine.device.peak.get("fp32", machine.peak) * DEPTHWISE_RATE)
        forward, backward = DEPTHWISE[0] * seconds + work, DEPTHWISE[1] * seconds + 2 * work
        return Seconds(forward, backward if operator.backward_flops else 0.0)
    if operator.channels_last:
        layout = LAST if machine.item_bytes <= 2 else FULL
    else:
        layout = FIRST if machine.item_bytes <= 2 or machine.precision == "tf32" else FULL
    if groups > 1:
        rate = _grouped_rate(layout, inputs // groups, groups) * _peak(machine)
        work = operator.flops * samples / shared / rate
        return _sums(operator, layout, (work, work, work), seconds)
    rate, columns = _peak(machine), outputs / shared
    forward = _padded(kernel * inputs) * _columns(columns)
    to_input = _padded(kernel * outputs / shared) * _columns(inputs)
    to_weight = _columns(kernel * inputs) * ceil(columns / INNER) * INNER
    # tiles fill whole waves; fewer tiles than units are split along the inner extent
    tiles, units = ceil(pixels / TILES[0][0]) * ceil(columns / TILES[0][0]), machine.device.units
    unit = 2 * pixels / rate * (ceil(tiles / units) * units / tiles if tiles > units else 1.0)
    if (
        machine.precision == "fp32"
        and len(sides) == 2
        and all(side.kernel == 3 and side.stride == side.dilation == 1 for side in sides)
    ):  # Winograd's algorithm serves it
        unit /= machine.stack.winograd
    if len(sides) == 3:
        unit /= machine.stack.volumes if machine.item_bytes == 4 else layout.volumes
    return _sums(operator, layout, (forward * unit, to_input * unit, to_weight * unit), seconds)


def _sums(operator: Operator, layout: MemoryLayout, work: tuple[float, float, float], seconds: float) -> Seconds:
    """Add up the three products, each bound by compute or memory, and their conversions of layout."""
    forward, to_input, to_weight = (max(part, seconds) + layout.conversions * seconds for part in work)
    if not operator.backward_flops:
        return Seconds(forward, 0.0)
    return Seconds(forward, to_weight + (to_input if operator.backward_flops > operator.flops else 0.0))


@lru_cache(maxsize=4096)
def _grouped_rate(layout: MemoryLayout, channels: int, groups: int) -> float:
    """Return the rate of a grouped convolution over a dense one."""
    if groups % layout.even:
        return layout.uneven * channels / (channels + layout.uneven_ramp)
    return layout.grouped * min(1.0, channels / layout.width)


@lru_cache(maxsize=4096)
def _padded(inner: float) -> float:
    return ceil(inner / INNER) * INNER + RAMP


@lru_cache(maxsize=4096)
def _columns(columns: float) -> float:
    """Return the output channels of the cheapest tiling, in units of the widest tile's rate."""
    return min(ceil(columns / tile) * tile / rate for tile, rate in TILES)


def _peak(machine: Machine) -> float:
    """Return the FLOP/s of dense convolutions in full tiles; without a calibrated share, 3/4 of matmuls'."""
    shares = machine.constants.convolution
    name = {4: "fp32"}.get(machine.item_bytes, "bf16")
    share = shares.get(machine.precision, shares.get(name))
    return machine.wide * share / machine.stack.matmul if share else 0.75 * machine.other.unit * machine.device.units


def operator_seconds(
    machine: Machine,
    operator: Operator,
    samples: float,
    degree: int = 1,
    sequence_parallel: bool = False,
    expert: int = 1,
    load: float = 1.0,
) -> Seconds:
    """Return forward and backward seconds of an operator, all calls together; for the arguments see ``matmul``."""
    sharding = operator.sharding
    shared = degree if sharding is Sharding.TENSOR or (sequence_parallel and sharding is Sharding.SEQUENCE) else 1
    kind = operator.kind
    if kind is OperatorClass.MEMORY:
        forward = _memory_seconds(machine, operator, operator.moved, samples / shared, shared)
        moved = operator.backward_moved
        return Seconds(forward, _memory_seconds(machine, operator, moved, samples / shared, shared) if moved else 0.0)
    if kind is OperatorClass.MATMUL:
        return matmul(machine, operator, samples, shared, expert, load)
    if kind is OperatorClass.ATTENTION:
        return _attention(machine, operator, samples / shared)
    return convolution(machine, operator, samples, shared)


def _memory_seconds(machine: Machine, operator: Operator, moved: float, samples: float, shared: int = 1) -> float:
    """Return the seconds of moving the operator's bytes, kernel by kernel; ``shared`` devices split the weights."""
    calls = operator.count or 1
    return calls * stream(machine, (moved * samples + operator.weight_bytes / shared) / calls)


def _attention(machine: Machine, operator: Operator, samples: float) -> Seconds:
    """Return the time of fused attention, whose thread blocks process query rows of a head."""
    heads, _, queries, keys, head_size = operator.shape
    blocks = ceil(samples * heads * ceil(queries / constants.ATTENTION_BLOCK))
    units = machine.device.units
    waves = ceil(blocks / units) * units / blocks
    seen, rates = attention_shape(operator.causal, keys, head_size)
    work = operator.flops * samples * seen * waves / machine.wide * machine.stack.attention
    forward = work / (rates[0] * machine.constants.attention)
    forward = max(forward, _memory_seconds(machine, operator, operator.moved, samples))
    if not operator.backward_flops:
        return Seconds(forward, 0.0)
    backward = work * constants.ATTENTION_BACKWARD_FLOPS / (rates[1] * machine.constants.attention_backward)
    return Seconds(forward, max(backward, _memory_seconds(machine, operator, operator.backward_moved, samples)))


@lru_cache(maxsize=4096)
def attention_shape(causal: bool, keys: int, head_size: int) -> tuple[float, tuple[float, float]]:
    """Return the share of scores that fused attention computes, and its rates in forward and backward over those with
    head size 128 and many keys.

    Under a causal mask whole blocks above the diagonal are skipped: (n + 1) / 2n of n x n blocks remain. Heads are
    padded to a multiple of 32 items (FlashAttention-2), and small ones leave the softmax units the bottleneck.
    """
    seen = (1 + min(1.0, constants.ATTENTION_BLOCK / keys)) / 2 if causal else 1.0
    visible, padded = keys * seen, 32 * ceil(head_size / 32)
    rate = visible / (visible + constants.ATTENTION_RAMP) * head_size / padded
    forward, backward = (min(1.0, padded / (padded + half) * (128 + half) / 128) for half in constants.HEAD_RAMP)
    return seen, (rate * forward, rate * backward)
