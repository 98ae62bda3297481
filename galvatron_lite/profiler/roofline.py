"""Seconds of one operator on one device from its shape and the data sheet (roofline).

Matmuls and convolutions have modules of their own; here are fused attention and memory-bound kernels.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from galvatron_lite.model.graph import Operator, OperatorClass, Sharding
from galvatron_lite.profiler import estimate_efficiency as constants
from galvatron_lite.profiler.roofline_convolution import convolution
from galvatron_lite.profiler.roofline_machine import Machine, Seconds, machine_of, stream, wide_precision
from galvatron_lite.profiler.roofline_matmul import matmul, matmul_seconds

__all__ = ["Machine", "Seconds", "machine_of", "matmul_seconds", "operator_seconds", "stream", "wide_precision"]


def operator_seconds(
    machine: Machine,
    operator: Operator,
    samples: float,
    degree: int = 1,
    sequence_parallel: bool = False,
    expert: int = 1,
) -> Seconds:
    """Forward and backward seconds of an operator, all calls together."""
    sharding = operator.sharding
    shared = degree if sharding is Sharding.TENSOR or (sequence_parallel and sharding is Sharding.SEQUENCE) else 1
    kind = operator.kind
    if kind is OperatorClass.MEMORY:
        return _memory(machine, operator, samples / shared, shared)
    if kind is OperatorClass.MATMUL:
        return matmul(machine, operator, samples, shared, expert)
    if kind is OperatorClass.ATTENTION:
        return _attention(machine, operator, samples / shared)
    return convolution(machine, operator, samples, shared)


def _memory(machine: Machine, operator: Operator, samples: float, shared: int) -> Seconds:
    forward = _calls(machine, operator, operator.moved, samples, shared)
    if not operator.backward_moved:
        return Seconds(forward, 0.0)
    return Seconds(forward, _calls(machine, operator, operator.backward_moved, samples, shared))


def _calls(machine: Machine, operator: Operator, moved: float, samples: float, shared: int = 1) -> float:
    """Seconds the operator's bytes take, kernel by kernel; each of ``shared`` devices has its slice of the weights."""
    calls = operator.count or 1
    return calls * stream(machine, (moved * samples + operator.weight_bytes / shared) / calls)


def _attention(machine: Machine, operator: Operator, samples: float) -> Seconds:
    """One fused kernel whose thread blocks take a head's query rows each; it skips what a causal mask hides."""
    heads, _, queries, keys, head_size = operator.shape
    blocks = ceil(samples * heads * ceil(queries / constants.ATTENTION_BLOCK))
    units = machine.device.units
    waves = ceil(blocks / units) * units / blocks
    seen, rates = attention_shape(operator.causal, keys, head_size)
    work = operator.flops * samples * seen * waves / machine.wide * machine.stack.attention
    forward = work / (rates[0] * machine.constants.attention)
    forward = max(forward, _calls(machine, operator, operator.moved, samples))
    if not operator.backward_flops:
        return Seconds(forward, 0.0)
    again = work * constants.ATTENTION_BACKWARD_FLOPS / (rates[1] * machine.constants.attention_backward)
    return Seconds(forward, max(again, _calls(machine, operator, operator.backward_moved, samples)))


@lru_cache(maxsize=4096)
def attention_shape(causal: bool, keys: int, head_size: int) -> tuple[float, tuple[float, float]]:
    """Share of the score matrix that fused attention computes, and its rates in forward and backward beside those of
    head size 128 and endless keys.

    Under a causal mask whole blocks above the diagonal are skipped: (n + 1) / 2n of n x n blocks remain. Heads are
    padded to a multiple of 32 items (FlashAttention-2), and small ones leave the softmax units the bottleneck.
    """
    seen = (1 + min(1.0, constants.ATTENTION_BLOCK / keys)) / 2 if causal else 1.0
    visible, padded = keys * seen, 32 * ceil(head_size / 32)
    rate = visible / (visible + constants.ATTENTION_RAMP) * head_size / padded
    forward, backward = (min(1.0, padded / (padded + half) * (128 + half) / 128) for half in constants.HEAD_RAMP)
    return seen, (rate * forward, rate * backward)
