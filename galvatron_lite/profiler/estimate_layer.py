"""Seconds of one layer on one device: its operators' rooflines against the host that launches them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass, Recompute
from galvatron_lite.profiler import estimate_efficiency as constants
from galvatron_lite.profiler.roofline import operator_seconds
from galvatron_lite.profiler.roofline_machine import Machine, stream
from galvatron_lite.stacks.schema import StateLayout
from galvatron_lite.units import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer, on the device and on the host, which run side by side."""

    forward: float  # forward, backward: of the device
    backward: float
    again: float  # of the device in the forward of what selective recompute runs again
    whole: float  # the same for full recompute
    forward_host: float
    backward_host: float
    again_host: float
    whole_host: float

    @property
    def forward_with_host(self) -> float:
        """Seconds of forward, of device and host together."""
        return behind_host(self.forward, self.forward_host)

    def backward_with_host(self, recompute: Recompute) -> float:
        """The same of backward with what is computed again."""
        if recompute is Recompute.NONE:
            return behind_host(self.backward, self.backward_host)
        if recompute is Recompute.FULL:
            return behind_host(self.backward + self.whole, self.backward_host + self.whole_host)
        return behind_host(self.backward + self.again, self.backward_host + self.again_host)


def behind_host(device: float, host: float) -> float:
    """Smooth maximum of device and host seconds (see ``QUEUE``)."""
    if not host:
        return device
    least, most = sorted((device, host))
    return float(most * (1 + (least / most) ** constants.QUEUE) ** (1 / constants.QUEUE))


def layer_times(
    machine: Machine,
    kind: LayerKind,
    states: StateLayout,
    samples: float,
    degree: int = 1,
    sequence_parallel: bool = False,
    expert: int = 1,
    early_stop: bool = False,
) -> LayerTimes:
    """Device and host seconds of one layer."""
    forward = backward = again = spared = 0.0
    launches = returns = repeats = unlaunched = 0
    marked = any(operator.again for operator in kind.operators)
    needed = _needed(kind.operators) if early_stop else len(kind.operators)
    for place, operator in enumerate(kind.operators):
        seconds = operator_seconds(machine, operator, samples, degree, sequence_parallel, expert)
        there, back = kernels(operator)
        forward, backward = forward + seconds.forward, backward + seconds.backward
        launches, returns = launches + there, returns + back
        if operator.again if marked else operator.kind is OperatorClass.MEMORY:
            again, repeats = again + seconds.forward, repeats + there
        if place >= needed:
            spared, unlaunched = spared + seconds.forward, unlaunched + there
    summed, sums = _accumulation(machine, kind, states, degree, sequence_parallel, expert)
    shared = kind.tensor_collectives / (1 if sequence_parallel else 2) if degree > 1 else 0
    shared *= constants.COLLECTIVE_LAUNCHES
    host = machine.stack.kernel_host
    return LayerTimes(
        forward,
        backward + summed,
        again,
        forward - spared,
        (launches + shared) * host,
        (returns + shared + sums) * host * constants.BACKWARD_HOST,
        repeats * host,
        (launches + shared - unlaunched) * host,
    )


def _needed(operators: Sequence[Operator]) -> int:
    """How many operators make tensors that backward needs: the last weighted matmul keeps but its input, and a residual
    addition behind it nothing; whatever else has work in backward (a norm, dropout) keeps something."""
    for place in range(len(operators) - 1, -1, -1):
        operator = operators[place]
        if operator.kind is OperatorClass.MATMUL and operator.weight_bytes:
            return place
        if operator.kind is not OperatorClass.MEMORY or not _keeps_nothing(operator):
            break
    return len(operators)


def _keeps_nothing(operator: Operator) -> bool:
    """Whether backward needs nothing of a memory-bound operator: it hands gradients on, or adds two of them up as
    forward added two tensors."""
    return not operator.backward_moved or (
        operator.name.endswith(".residual") and operator.backward_moved == operator.moved
    )


def kernels(operator: Operator) -> tuple[int, int]:
    """Kernels that the host launches for an operator, in forward and in backward."""
    calls = operator.count or 1
    if operator.kind is OperatorClass.MEMORY:
        return calls, calls if operator.backward_moved else 0
    back = constants.BACKWARD_KERNELS[operator.kind] if operator.backward_flops else 0
    if operator.kind is not OperatorClass.MATMUL or not operator.weight_bytes:
        return calls, calls * back
    return 1, back  # a grouped matmul of experts is one kernel


def _accumulation(
    machine: Machine, kind: LayerKind, states: StateLayout, degree: int, split: bool, expert: int
) -> tuple[float, int]:
    """Seconds that adding gradients up takes in backward, and kernels: where they live in buffers, every micro-batch
    reads and writes them."""
    tensors = sum(1 for operator in kind.operators if operator.kind is OperatorClass.MATMUL and operator.weight_bytes)
    if not states.buffered_gradients or not tensors:
        return 0.0, 0
    items = kind.parameters.at(degree, split) - kind.expert_parameters / degree * (1 - 1 / expert)
    return stream(machine, items * 2 * ITEM_BYTES[states.gradients]), tensors
