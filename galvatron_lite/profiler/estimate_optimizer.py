"""What updating parameters costs, from the memory that passes by. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from galvatron_lite.calibration.schema import StackConstants
from galvatron_lite.errors import InputError
from galvatron_lite.profiler.estimate_efficiency import OPTIMIZERS
from galvatron_lite.profiler.roofline_machine import Machine
from galvatron_lite.profiler.schema import OptimizerCost
from galvatron_lite.stacks.schema import StateLayout
from galvatron_lite.units import ITEM_BYTES

_FP32 = 4


def optimizer_cost(
    machines: Sequence[Machine], name: str, states: StateLayout | None = None, stack: StackConstants | None = None
) -> OptimizerCost:
    """Update time from memory traffic: every item of parameter, gradient and state passes through memory.

    Args:
        machines: the slowest counts.
        name: a key of ``OPTIMIZERS``.
        states: precisions at rest; None: all in fp32.
        stack: factors of the training software; None: none.

    Raises:
        InputError: an optimizer whose traffic is not known.
    """
    if name not in OPTIMIZERS:
        raise InputError("--optimizer", name, f"Known for estimates: {', '.join(OPTIMIZERS)}.")
    traffic, stack = OPTIMIZERS[name], stack or StackConstants()
    moved = traffic.moved + handling_bytes(states or StateLayout())
    seconds = stack.optimizer * max(moved / machine.bandwidth for machine in machines)
    share = 1.0 if traffic.working else 0.0
    # Where parameters are narrow the stack says what is held beside them, masters among it.
    held = states.optimizer_bytes if states and ITEM_BYTES[states.parameters] < _FP32 else traffic.state
    return OptimizerCost(name, held, seconds, traffic.launches * stack.kernel_host, float(traffic.working), share)


def handling_bytes(states: StateLayout) -> int:
    """Bytes that pass for one parameter item around the update of fp32 masters.

    The norm of gradients reads them, clipping reads and writes them. Where gradients are not in fp32 the masters' are
    cast from them first; where parameters are not, they are written from the masters at the end (Megatron-LM,
    ``optimizer/optimizer.py``: ``_copy_model_grads_to_main_grads``, ``clip_grad_norm``,
    ``_copy_main_params_to_model_params``). Gradient buffers are zeroed at the start of a step.
    """
    gradient, parameter = ITEM_BYTES[states.gradients], ITEM_BYTES[states.parameters]
    main = states.optimizer_bytes > 2 * _FP32
    held = _FP32 if main else gradient
    moved = 3 * held
    moved += gradient + _FP32 if main and gradient < _FP32 else 0
    moved += _FP32 + parameter if main and parameter < _FP32 else 0
    return moved + (gradient if states.buffered_gradients else 0)
