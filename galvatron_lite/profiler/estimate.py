"""A profile from data sheets: the same schema as a measured one, no GPU needed.

Forward and backward of a layer are the sums of its operators' rooflines (``roofline``), but no less than the host
takes to launch their kernels (``layer_times``); recompute ``full`` adds the whole forward to backward, ``selective``
that of the operators it runs again. Communication is not in the layers: the cost model takes it from the cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from galvatron_lite.calibration.schema import Calibration, StackConstants
from galvatron_lite.calibration.store import constants_for_device, constants_for_stack, load_calibration
from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, ModelGraph, Operator, OperatorClass, Recompute
from galvatron_lite.parallelism.channel.cost import BY
from galvatron_lite.parallelism.channel.parts import divides, each_divides, sliced_kind, splits_channels
from galvatron_lite.parallelism.context.cost import LEAST_TOKENS, splits_tokens
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.expert.cost import rank_load
from galvatron_lite.parallelism.pictures import is_picture
from galvatron_lite.parallelism.spatial.grids import splits_pixels
from galvatron_lite.profiler import machine as constants
from galvatron_lite.profiler.machine import (
    HOST,
    NVIDIA_OVERLAP,
    OPTIMIZERS,
    Machine,
    machine_of,
    stream,
    wide_precision,
)
from galvatron_lite.profiler.roofline import operator_seconds
from galvatron_lite.profiler.schema import (
    PROFILE_VERSION,
    DeviceFigures,
    HostOverhead,
    LayerPoint,
    OptimizerCost,
    Origin,
    OriginKind,
    Profile,
)
from galvatron_lite.stacks.catalog import GALVATRON
from galvatron_lite.stacks.schema import Stack, StateLayout
from galvatron_lite.units import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer, on the device and on the host, which run side by side."""

    forward: float  # forward, backward: of the device
    backward: float
    again: float  # of the device in the forward of what selective recompute runs again
    full: float  # the same for full recompute
    forward_host: float
    backward_host: float
    again_host: float
    full_host: float

    @property
    def forward_with_host(self) -> float:
        """Seconds of forward, of device and host together."""
        return behind_host(self.forward, self.forward_host)

    def backward_with_host(self, recompute: Recompute) -> float:
        """The same of backward with what is computed again."""
        if recompute is Recompute.NONE:
            return behind_host(self.backward, self.backward_host)
        if recompute is Recompute.FULL:
            return behind_host(self.backward + self.full, self.backward_host + self.full_host)
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
    load = rank_load(kind, expert)
    for place, operator in enumerate(kind.operators):
        seconds = operator_seconds(machine, operator, samples, degree, sequence_parallel, expert, load)
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
        # a sum hands its gradient on, or adds two of them up as forward added two tensors
        summed = operator.name.endswith(".residual") and operator.backward_moved == operator.moved
        if operator.kind is not OperatorClass.MEMORY or (operator.backward_moved and not summed):
            break
    return len(operators)


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
    trained = (operator for operator in kind.operators if operator.weight_bytes and not operator.frozen)
    tensors = sum(operator.kind is OperatorClass.MATMUL for operator in trained)
    if not states.buffered_gradients or not tensors:
        return 0.0, 0
    experts = (kind.expert_parameters - kind.frozen_experts) / degree * (1 - 1 / expert)
    items = kind.parameters.at(degree, split) - kind.frozen.at(degree, split) - experts
    return stream(machine, items * 2 * ITEM_BYTES[states.gradients]), tensors


_FP32 = 4


def optimizer_cost(
    machines: Sequence[Machine], name: str, states: StateLayout | None = None, stack: StackConstants | None = None
) -> OptimizerCost:
    """Update time from memory traffic: every item of parameter, gradient and state passes through memory."""
    if name not in OPTIMIZERS:
        raise InputError("--optimizer", name, f"Known for estimates: {', '.join(OPTIMIZERS)}.")
    traffic, stack = OPTIMIZERS[name], stack or StackConstants()
    moved = traffic.moved + handling_bytes(states or StateLayout())
    seconds = stack.optimizer * max(moved / machine.bandwidth for machine in machines)
    # Where parameters are narrow the stack says what is held beside them, masters among it.
    held = states.optimizer_bytes if states and ITEM_BYTES[states.parameters] < _FP32 else traffic.state
    working = float(traffic.working + (_FP32 if states and _casts_gradients(states) else 0))
    return OptimizerCost(name, held, seconds, traffic.launches * stack.kernel_host, working, 1.0 if working else 0.0)


def _casts_gradients(states: StateLayout) -> bool:
    """Whether an update makes fp32 gradients of masters from narrower ones (Megatron-LM, ``optimizer/optimizer.py``:
    ``_copy_model_grads_to_main_grads``; InternEvo, ``solver/optimizer/fsdp_optimizer.py``)."""
    return states.optimizer_bytes > 2 * _FP32 and ITEM_BYTES[states.gradients] < _FP32


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
    moved += gradient + _FP32 if _casts_gradients(states) else 0
    moved += _FP32 + parameter if main and parameter < _FP32 else 0
    return moved + (gradient if states.buffered_gradients else 0)


SAMPLES = (1, 2, 4, 8, 16, 32, 64)
"""Samples a device that are estimated; the cost model interpolates between them."""

LARGEST_DEGREE = 64  # tensor-parallel degrees above this are not estimated

Wanted = tuple[str, int, bool, Recompute, float]
"""Kind, tensor degree, sequence parallel, recompute choice, samples."""


class _Choice(NamedTuple):
    """What a point is estimated for; see ``LayerPoint``."""

    kind: str
    tensor: int
    split: bool  # whether tokens are shared, too
    recompute: Recompute
    samples: float
    expert: int = 1
    by: str = ""  # the field of ``Strategy`` that splits channels
    shares: int = 1  # its degree


__all__ = [
    "LARGEST_DEGREE",
    "SAMPLES",
    "Wanted",
    "estimate_profile",
    "optimizer_cost",
    "stack_constants",
    "tensor_degrees",
]


def estimate_profile(
    graph: ModelGraph,
    cluster: Cluster,
    *,
    precision: str,
    name: str,
    samples: Sequence[int] = SAMPLES,
    optimizer: str | None = None,
    stack: Stack | None = None,
    calibration: Calibration | None = None,
    wanted: Collection[Wanted] | None = None,
    expert: int = 1,
    context: int = 1,
) -> Profile:
    """A profile of a model on a cluster from data sheets.

    In a cluster of unlike devices every figure is the slowest device's; ``types`` holds those of each.

    Args:
        graph: the model; its byte figures must be of the item size of ``precision`` (of bf16 for fp8 and narrower).
        precision: of compute: fp32, tf32, fp16, bf16; fp8, mxfp8, nvfp4 of linear layers.
        samples: samples on a device to estimate points for.
        optimizer: a name of ``OPTIMIZERS``; None: the stack's.
        stack: the training software; None: our own runtime.
        calibration: constants; None: the shipped ones.
        wanted: the only points to estimate; None: all legal choices, shares of a sample and spread experts among
            them. Points that a kind does not offer are left out.
        expert: devices that the experts of a mixture are spread over, where ``wanted`` says what to estimate.
        context: devices that share the tokens of a sample.
    """
    stack, calibration = stack or GALVATRON, calibration or load_calibration()
    host = stack_constants(stack, calibration)
    if any(is_picture(kind) for kind in graph.kinds.values()):  # some constants are of networks of pictures only
        host = replace(host, memory=host.pictures or host.memory)
    else:
        host = replace(host, sharing=0.0)
    if context > 1:
        host = replace(host, attention=host.attention * host.ring)
    devices = list({group.device.name: group.device for group in cluster.groups}.values())
    machines = [
        machine_of(
            item, precision, constants_for_device(calibration, item.name, item.source), host, stack.uneven_shares
        )
        for item in devices
    ]
    wide = wide_precision(precision)
    if ITEM_BYTES[wide] != ITEM_BYTES.get(wide_precision(graph.precision)):
        raise InputError("--precision", precision, f"The model was captured in {graph.precision}; capture it anew.")
    near = cluster.levels[0].size
    each = stack.pictures.gathers_each
    choices = list(_every(graph, cluster.devices, near, samples, each)) if wanted is None else []
    for item in wanted or ():
        kind = graph.kinds.get(item[0])
        if kind is not None and item[3] in kind.kept:
            choices.append(_Choice(*item, expert if kind.expert_parameters else 1))
    states = stack.states

    def figures(machines: Sequence[Machine], device: str) -> DeviceFigures:
        return DeviceFigures(
            device,
            tuple(_points(graph, machines, stack, choices)),
            optimizer_cost(machines, optimizer or stack.optimizer, states, host),
            HostOverhead(
                step=host.step_host,
                pipeline=HOST.pipeline,
                branch=HOST.branch,
                # a byte is read and written
                gathered_per_byte=2 / min(m.bandwidth for m in machines) if stack.copies_gathered else 0.0,
                microbatch=host.microbatch_host,
            ),
        )

    # parameters are gathered in the precision of compute where it is as wide as the stack's
    as_wide = ITEM_BYTES[wide] == 4 or ITEM_BYTES.get(states.gather, 1) == ITEM_BYTES[wide]
    gathered = wide if as_wide else states.gather
    slowest, unlike = figures(machines, ""), zip(machines, devices, strict=True) if len(devices) > 1 else ()
    return Profile(
        version=PROFILE_VERSION,
        name=name,
        graph=graph,
        cluster=cluster,
        origin=Origin(OriginKind.ESTIMATED, f"data sheet of {', '.join(d.name for d in devices)}, {precision}"),
        communication_origin=Origin(OriginKind.ESTIMATED, f"levels of cluster {cluster.name}"),
        layers=slowest.layers,
        optimizer=slowest.optimizer,
        overlap=NVIDIA_OVERLAP,
        hidden=dict(host.hidden),
        scattered_sends=stack.scattered_sends,
        steps_overlap=stack.steps_overlap,
        straggling=host.straggling,
        sharing=host.sharing,
        overhead=slowest.overhead,
        types=tuple(figures([machine], device.name) for machine, device in unlike),
        gather_precision=gathered,
        reduce_precision=states.reduce,
        parameter_precision=states.parameters,
        bucket_bytes=states.bucket_bytes,
        passing_bytes=states.passing_bytes,
        copied_bytes=ITEM_BYTES[wide] if states.copies and ITEM_BYTES[wide] < ITEM_BYTES[states.parameters] else 0,
        transport=stack.transport,
        pictures=stack.pictures,
    )


def stack_constants(stack: Stack, calibration: Calibration) -> StackConstants:
    """What a stack costs: the constants it carries, else the calibrated ones of its name."""
    return stack.constants if stack.constants != StackConstants() else constants_for_stack(calibration, stack.name)


def tensor_degrees(kind: LayerKind, devices: int) -> tuple[int, ...]:
    """Legal tensor-parallel degrees of a kind on up to so many devices: divisors of what its structure allows."""
    largest = min(LARGEST_DEGREE, devices, kind.tensor_degrees)
    return tuple(degree for degree in range(1, largest + 1) if kind.tensor_degrees % degree == 0)


def _every(graph: ModelGraph, devices: int, near: int, samples: Sequence[float], each: bool) -> Iterator[_Choice]:
    for key, kind in graph.kinds.items():
        for by, sliced in _slices(kind, min(near, devices), each):
            for count, recompute in product(samples[::2], kind.kept):
                yield _Choice(key, 1, False, recompute, count, 1, by, sliced)
        for expert, degree in product(_spreads(kind, devices), tensor_degrees(kind, devices)):
            for split in (False, True) if kind.sequence_parallel and degree > 1 else (False,):
                counts = (*_shares(kind, devices // degree, degree if split else 1), *samples)
                for count, recompute in product(counts, kind.kept):
                    yield _Choice(key, degree, split, recompute, count, expert)


def _spreads(kind: LayerKind, devices: int) -> tuple[int, ...]:
    """Devices that the experts of a mixture may be spread over."""
    if not kind.expert_parameters or kind.dims.experts < 2:
        return (1,)
    return tuple(degree for degree in divisors(kind.dims.experts) if degree <= devices)


def _slices(kind: LayerKind, near: int, each: bool) -> Iterator[tuple[str, int]]:
    """How the channels of convolutions may be shared within a node of so many devices."""
    for by in BY:
        if each:
            yield from ((by, degree) for degree in divisors(near)[1:] if each_divides(kind, by, degree))
        elif splits_channels(kind, by):
            yield from ((by, degree) for degree in divisors(near)[1:] if divides(kind, by, degree))


def _shares(kind: LayerKind, devices: int, slices: int) -> tuple[float, ...]:
    """Shares of a sample, halved until they have the fewest tokens, of a kind whose tokens may be shared; down to one
    device's pixels where those may be."""
    if splits_pixels(kind):
        return tuple(2.0**-power for power in range(min(devices, LARGEST_DEGREE).bit_length() - 1, 0, -1))
    if not splits_tokens(kind):
        return ()
    most = min(kind.dims.sequence // (LEAST_TOKENS * slices), devices)
    return tuple(2.0**-power for power in range(most.bit_length() - 1, 0, -1))


def _points(
    graph: ModelGraph, machines: Sequence[Machine], stack: Stack, choices: Sequence[_Choice]
) -> Iterator[LayerPoint]:
    times: dict[_Choice, LayerTimes] = {}
    kinds: dict[tuple[str, str, int], LayerKind] = {}
    for choice in choices:
        name, by, ways = key = choice.kind, choice.by, choice.shares
        if key not in kinds:
            whole = graph.kinds[name]
            kinds[key] = sliced_kind(whole, by, ways, stack.pictures.gathers_each) if by else whole
        plain = choice._replace(recompute=Recompute.NONE)
        if plain not in times:
            where = choice.samples, choice.tensor, choice.split, choice.expert, stack.early_stop
            every = [layer_times(machine, kinds[key], stack.states, *where) for machine in machines]
            times[plain] = max(every, key=lambda item: item.forward + item.backward)
        yield _point(choice, kinds[key], times[plain])


def _point(choice: _Choice, kind: LayerKind, times: LayerTimes) -> LayerPoint:
    """One point; under recompute all that a plain layer keeps lives again while its backward runs."""
    samples, degree, split = choice.samples, choice.tensor, choice.split
    kept = kind.kept[choice.recompute].at(degree, split) * samples
    plain = kind.kept.get(Recompute.NONE, kind.kept[choice.recompute]).at(degree, split) * samples
    spared = kind.spared_bytes / degree if degree > 1 else 0.0
    rebuilt = plain + kept if choice.recompute is Recompute.FULL else max(plain, kept)
    return LayerPoint(
        kind=choice.kind,
        samples=samples,
        tensor=degree,
        sequence_parallel=split,
        recompute=choice.recompute,
        forward=times.forward_with_host,
        backward=times.backward_with_host(choice.recompute),
        kept=round(kept),
        working=round(rebuilt + max(kind.working.at(degree, split) - spared, 0.0) * samples),
        forward_working=round(max(plain, kept) + kind.forward_working.at(degree, split) * samples),
        expert=choice.expert,
        filters=choice.shares if choice.by == "filters" else 1,
        channels=choice.shares if choice.by == "channels" else 1,
    )
