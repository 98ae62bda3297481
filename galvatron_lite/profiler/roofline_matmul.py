"""Seconds of matmuls by shape: tiles, waves, split inner extents, grouped and batched ones.

A matmul's output is cut into tiles, and the device works through them in waves of one tile a multiprocessor: the last
wave is paid in full (NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave quantisation). The kernel
library takes the cheapest tile. Nothing runs faster than its bytes can be moved or a kernel can be launched.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, floor, prod

from galvatron_lite.model.graph import Operator, Sharding
from galvatron_lite.profiler import estimate_efficiency as constants
from galvatron_lite.profiler.roofline_machine import NARROW, Machine, Rates, Seconds, machine_of, stream

_ROW_SPLIT = frozenset(("out", "down", "projection", "o_proj", "down_proj", "c_proj", "o"))


def matmul_seconds(machine: Machine, rows: float, inner: float, columns: float) -> float:
    """Seconds of one matmul (rows x inner) @ (inner x columns) in the precision of linear layers."""
    return matmul_at(machine.linear, rows, inner, columns)


@lru_cache(maxsize=1 << 17)
def matmul_at(rates: Rates, rows: float, inner: float, columns: float, groups: float = 1) -> float:
    """Seconds of one matmul, or of ``groups`` equal ones in one kernel whose tiles fill waves together."""
    moved = groups * (rows * inner + inner * columns + rows * columns) * rates.item_bytes
    work = (
        _gpu_work(rates, rows, inner, columns, groups) if rates.gpu else _cpu_work(rates, rows, inner, columns, groups)
    )
    return max(work, rates.launch, rates.tail + moved / rates.bandwidth)


def _gpu_work(rates: Rates, rows: float, inner: float, columns: float, groups: float) -> float:
    units, ramp = rates.units, constants.RAMP_INNER if rates.units > 1 else 0
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


def _cpu_work(rates: Rates, rows: float, inner: float, columns: float, groups: float) -> float:
    size = constants.CPU_TILE
    tiles = groups * ceil(rows / size) * ceil(columns / size)
    ramp = constants.RAMP_INNER if rates.units > 1 else 0
    return ceil(tiles / rates.units) * (inner + ramp) * 2 * size * size / rates.unit


def matmul(machine: Machine, operator: Operator, samples: float, shared: int, expert: int = 1) -> Seconds:
    """Forward and backward of a matmul operator, all calls together.

    Backward is one matmul for the input's and one for the weights' gradient. ``shared``: ways the operator is divided;
    ``expert``: devices its experts are spread over, each of which then sees that many times the rows.
    """
    if not operator.weight_bytes:
        return _batched(machine, operator, samples, shared)
    rates = machine.linear if operator.precision in NARROW or not machine.narrow else machine.other
    rows, inner, columns = operator.shape[0] * samples, operator.shape[1], operator.shape[2]
    groups = max(1.0, operator.count / expert) if operator.count > 1 else 1
    rows *= operator.count / groups
    forward = both = 0.0
    ways = _ways(operator, rows, inner, columns, shared)
    for m, k, n in ways:
        slow = _alignment(k, n, rates)
        forward += slow * matmul_at(rates, m, k, n, groups)
        both += slow * (matmul_at(rates, m, n, k, groups) + matmul_at(rates, k, m, n, groups))
    calls = operator.flops / (2 * prod(operator.shape) * operator.count)
    seconds = _scaled(operator, calls * forward / len(ways), calls * both / len(ways))
    return _with_sums(machine, operator, samples / shared, seconds)


def _ways(
    operator: Operator, rows: float, inner: float, columns: float, shared: int
) -> tuple[tuple[float, float, float], ...]:
    """How a split matmul may run: columns or inner extent divided; the mean of both where the name does not tell."""
    if shared == 1:
        return ((rows, inner, columns),)
    if operator.sharding is not Sharding.TENSOR:
        return ((rows / shared, inner, columns),)
    by_columns, by_rows = (rows, inner, columns / shared), (rows, inner / shared, columns)
    last = operator.name.rpartition(".")[2]
    if last in _ROW_SPLIT:
        return (by_rows,)
    return (by_columns,) if last in constants.COLUMN_SPLIT else (by_columns, by_rows)


def _alignment(inner: float, columns: float, rates: Rates) -> float:
    """Factor on the time of 16-bit matmuls where rows of a matrix do not begin at multiples of 16 bytes."""
    if not rates.gpu or rates.item_bytes != 2 or not (inner % 8 or columns % 8):
        return 1.0
    # Most ranks' share of an uneven split; padded ones are even.
    extents = [floor(inner), floor(columns), *([ceil(inner), ceil(columns)] if rates.uneven else [])]
    aligned = min(2 * (extent & -extent) for extent in extents)
    return constants.MISALIGNED.get(aligned, 1.0)


def _batched(machine: Machine, operator: Operator, samples: float, shared: int) -> Seconds:
    """A matmul of two activations a head (plain attention), the heads folded into the rows."""
    rows, inner, columns = operator.shape[0] * samples / shared, operator.shape[1], operator.shape[2]
    rates, factor = machine.other, machine.stack.attention / machine.stack.matmul
    size = min(inner, columns)  # of a head; the other extent is that of keys
    if _alignment(size, size, rates) > 1:
        rates = _without_tensor_cores(machine)
    calls = operator.flops / (2 * prod(operator.shape))
    floor = stream(machine, operator.moved * samples / shared / max(1, operator.count)) * max(1, operator.count)
    forward = max(factor * calls * matmul_at(rates, rows, inner, columns), floor)
    to_input = max(factor * calls * matmul_at(rates, rows, columns, inner), floor)
    return Seconds(forward, to_input + forward if operator.backward_flops else 0.0)


def _without_tensor_cores(machine: Machine) -> Rates:
    """Rates of batched matmuls whose heads do not begin at multiples of 16 bytes: on the fp32 units. An odd number of
    keys costs nothing of the kind (vision transformers with 197).

    One of BigScience's models on A100 takes 30 to 40 % longer with 128 heads of 108 than with 96 of 144
    (github.com/bigscience-workshop/bigscience, train/tr11-176B-ml): its attention runs at 17 TFLOP/s.
    """
    plain = machine_of(machine.device, "fp32", machine.constants, machine.stack)
    return machine.other._replace(unit=min(plain.other.unit, machine.other.unit))


def _scaled(operator: Operator, forward: float, both: float) -> Seconds:
    """A frozen matmul, or one whose input needs no gradient, does less in backward."""
    share = operator.backward_flops / (2 * operator.flops) if operator.flops else 0.0
    return Seconds(forward, both * share)


def _with_sums(machine: Machine, operator: Operator, samples: float, seconds: Seconds) -> Seconds:
    """What backward moves beyond its two matmuls: the bias's gradient, input gradients of siblings added up."""
    extra = (operator.backward_moved - 2 * operator.moved) * samples
    if extra <= 0 or not operator.backward_flops:
        return seconds
    return Seconds(seconds.forward, seconds.backward + stream(machine, extra))
