"""Estimates profiles from data sheets, in the schema of measured ones, without a GPU.

Forward and backward of a layer are the sums of its operators' rooflines (``roofline``), bounded below by the time the
host takes to launch their kernels (``layer_times``). Full recomputation adds forward to backward, selective
recomputation that of the operators it runs again. Layers do not include communication, which the cost model takes from
the cluster.
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
from galvatron_lite.parallelism.channel.parts import BY, divides, each_divides, sliced_kind, splits_channels
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
    LayerSetting,
    OptimizerCost,
    Origin,
    OriginKind,
    Profile,
)
from galvatron_lite.stacks.catalog import GALVATRON
from galvatron_lite.stacks.schema import Stack, StateLayout
from galvatron_lite.units import ITEM_BYTES


class PassTime(NamedTuple):
    """Time of one pass through a layer: device and host work side by side."""

    device: float  # seconds
    host: float  # seconds

    @property
    def seconds(self) -> float:
        """Smooth maximum of device and host seconds (see ``QUEUE``)."""
        if not self.host:
            return self.device
        least, most = sorted(self)
        return float(most * (1 + (least / most) ** constants.QUEUE) ** (1 / constants.QUEUE))


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Estimated times of one layer."""

    forward: PassTime
    backward: PassTime
    selective: PassTime  # the part of forward that selective recomputation runs again
    full: PassTime  # the part of forward that full recomputation runs again

    def backward_with(self, recompute: Recompute) -> PassTime:
        """Return the time of backward and the recomputation in it."""
        if recompute is Recompute.NONE:
            return self.backward
        again = self.full if recompute is Recompute.FULL else self.selective
        return PassTime(self.backward.device + again.device, self.backward.host + again.host)


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
    """Estimate the times of one layer.

    Args:
        machine: the device.
        kind: the layer.
        states: precisions of gradients and parameters.
        samples: samples on the device.
        degree: tensor-parallel degree.
        sequence_parallel: whether tokens are split over the tensor group, too.
        expert: devices that experts are spread over.
        early_stop: whether full recomputation stops once backward has its inputs.
    """
    forward = backward = selective = spared = 0.0
    kernels_forward = kernels_backward = kernels_selective = kernels_spared = 0
    marks_recomputed = any(operator.again for operator in kind.operators)
    needed = _needed_in_backward(kind.operators) if early_stop else len(kind.operators)
    load = rank_load(kind, expert)
    for number, operator in enumerate(kind.operators):
        seconds = operator_seconds(machine, operator, samples, degree, sequence_parallel, expert, load)
        launches, launches_backward = kernels(operator)
        forward, backward = forward + seconds.forward, backward + seconds.backward
        kernels_forward, kernels_backward = kernels_forward + launches, kernels_backward + launches_backward
        if operator.again if marks_recomputed else operator.kind is OperatorClass.MEMORY:
            selective, kernels_selective = selective + seconds.forward, kernels_selective + launches
        if number >= needed:
            spared, kernels_spared = spared + seconds.forward, kernels_spared + launches
    accumulation, additions = _accumulation(machine, kind, states, degree, sequence_parallel, expert)
    collectives = kind.tensor_collectives / (1 if sequence_parallel else 2) if degree > 1 else 0
    collectives *= constants.COLLECTIVE_LAUNCHES
    host = machine.stack.kernel_host
    backward_host = (kernels_backward + collectives + additions) * host * constants.BACKWARD_HOST
    return LayerTimes(
        forward=PassTime(forward, (kernels_forward + collectives) * host),
        backward=PassTime(backward + accumulation, backward_host),
        selective=PassTime(selective, kernels_selective * host),
        full=PassTime(forward - spared, (kernels_forward + collectives - kernels_spared) * host),
    )


def _needed_in_backward(operators: Sequence[Operator]) -> int:
    """Return the number of leading operators whose results backward needs.

    The last matmul with weights saves its input only and a residual addition behind it nothing; any other operator with
    work in backward (a norm, dropout) saves something.
    """
    for number in range(len(operators) - 1, -1, -1):
        operator = operators[number]
        if operator.kind is OperatorClass.MATMUL and operator.weight_bytes:
            return number
        # backward of a sum passes its gradient on, or adds two gradients as forward added two tensors
        is_sum = operator.name.endswith(".residual") and operator.backward_moved == operator.moved
        if operator.kind is not OperatorClass.MEMORY or (operator.backward_moved and not is_sum):
            break
    return len(operators)


def kernels(operator: Operator) -> tuple[int, int]:
    """Return the number of kernels that the host launches for an operator in forward and in backward."""
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
    """Return the seconds and kernels of accumulating gradients in buffers, which each micro-batch reads and writes."""
    trained = (operator for operator in kind.operators if operator.weight_bytes and not operator.frozen)
    tensors = sum(operator.kind is OperatorClass.MATMUL for operator in trained)
    if not states.buffered_gradients or not tensors:
        return 0.0, 0
    elsewhere = (kind.expert_parameters - kind.frozen_experts) / degree * (1 - 1 / expert)  # on other expert ranks
    items = kind.parameters.at(degree, split) - kind.frozen.at(degree, split) - elsewhere
    return stream(machine, items * 2 * ITEM_BYTES[states.gradients]), tensors


_FP32 = 4


def optimizer_cost(
    machines: Sequence[Machine], name: str, states: StateLayout | None = None, stack: StackConstants | None = None
) -> OptimizerCost:
    """Estimate an optimizer's update from its memory traffic, on the slowest of some devices."""
    if name not in OPTIMIZERS:
        raise InputError("--optimizer", name, f"Known for estimates: {', '.join(OPTIMIZERS)}.")
    traffic, stack = OPTIMIZERS[name], stack or StackConstants()
    moved = traffic.moved + handling_bytes(states or StateLayout())
    seconds = stack.optimizer * max(moved / machine.bandwidth for machine in machines)
    # With narrow parameters the stack says which states there are, masters included.
    state_bytes = states.optimizer_bytes if states and ITEM_BYTES[states.parameters] < _FP32 else traffic.state
    working = float(traffic.working + (_FP32 if states and _casts_gradients(states) else 0))
    launches = traffic.launches * stack.kernel_host
    return OptimizerCost(name, state_bytes, seconds, launches, working, 1.0 if working else 0.0)


def _casts_gradients(states: StateLayout) -> bool:
    """Whether an update casts narrow gradients to fp32 for its masters (Megatron-LM, ``optimizer/optimizer.py``:
    ``_copy_model_grads_to_main_grads``; InternEvo, ``solver/optimizer/fsdp_optimizer.py``)."""
    return states.optimizer_bytes > 2 * _FP32 and ITEM_BYTES[states.gradients] < _FP32


def handling_bytes(states: StateLayout) -> int:
    """Return the memory traffic of a step besides the optimizer's update, bytes for each parameter item.

    The norm reads gradients, clipping reads and writes them. Narrow gradients are first cast to fp32 for the masters,
    narrow parameters are last written from the masters (Megatron-LM, ``optimizer/optimizer.py``:
    ``_copy_model_grads_to_main_grads``, ``clip_grad_norm``, ``_copy_main_params_to_model_params``). Gradient buffers
    are zeroed at the start of a step.
    """
    gradient, parameter = ITEM_BYTES[states.gradients], ITEM_BYTES[states.parameters]
    has_masters = states.optimizer_bytes > 2 * _FP32
    moved = 3 * (_FP32 if has_masters else gradient)
    moved += gradient + _FP32 if _casts_gradients(states) else 0
    moved += _FP32 + parameter if has_masters and parameter < _FP32 else 0
    return moved + (gradient if states.buffered_gradients else 0)


SAMPLES = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of samples on a device that are estimated; the cost model interpolates between them."""

LARGEST_DEGREE = 64  # largest tensor-parallel degree that is estimated

Wanted = tuple[str, int, bool, Recompute, float]
"""A point to estimate: kind, tensor degree, sequence parallel, recomputation, samples."""


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
    """Estimate the profile of a model on a cluster from data sheets.

    In a cluster of unlike devices every figure is the slowest device's; ``types`` holds those of each.

    Args:
        graph: the model; its byte figures must be of the item size of ``precision`` (of bf16 for fp8 and narrower).
        cluster: the cluster.
        precision: precision of compute: fp32, tf32, fp16, bf16; fp8, mxfp8, nvfp4 of linear layers.
        name: name of the profile.
        samples: samples on a device to estimate points for.
        optimizer: a name of ``OPTIMIZERS``; None: the stack's.
        stack: the training software; None: our runtime.
        calibration: constants; None: the shipped ones.
        wanted: the only points to estimate; None: all legal choices, shares of a sample and spread experts included.
            Points that a kind does not offer are left out.
        expert: devices that experts are spread over in the points ``wanted``.
        context: devices that share the tokens of a sample.

    Raises:
        InputError: a precision that the graph or a device does not have, or an unknown optimizer.
    """
    stack, calibration = stack or GALVATRON, calibration or load_calibration()
    host = _constants_for(graph, stack_constants(stack, calibration), context)
    devices = list({group.device.name: group.device for group in cluster.groups}.values())
    machines = [
        machine_of(
            device, precision, constants_for_device(calibration, device.name, device.source), host, stack.uneven_shares
        )
        for device in devices
    ]
    wide = wide_precision(precision)
    if ITEM_BYTES[wide] != ITEM_BYTES.get(wide_precision(graph.precision)):
        raise InputError("--precision", precision, f"The model was captured in {graph.precision}; capture it anew.")
    node, gathers_each = cluster.levels[0].size, stack.pictures.gathers_each
    every_setting = _all_settings(graph, cluster.devices, node, samples, gathers_each)
    settings = list(every_setting if wanted is None else _offered_settings(graph, wanted, expert))
    states = stack.states

    def figures(machines: Sequence[Machine], device: str) -> DeviceFigures:
        return DeviceFigures(
            device,
            tuple(_points(graph, machines, stack, settings)),
            optimizer_cost(machines, optimizer or stack.optimizer, states, host),
            HostOverhead(
                step=host.step_host,
                pipeline=HOST.pipeline,
                branch=HOST.branch,
                # each byte is read and written
                gathered_per_byte=2 / min(m.bandwidth for m in machines) if stack.copies_gathered else 0.0,
                microbatch=host.microbatch_host,
            ),
        )

    # parameters are gathered in the precision of compute if it is as wide as the stack's
    is_as_wide = ITEM_BYTES[wide] == 4 or ITEM_BYTES.get(states.gather, 1) == ITEM_BYTES[wide]
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
        gather_precision=wide if is_as_wide else states.gather,
        reduce_precision=states.reduce,
        parameter_precision=states.parameters,
        bucket_bytes=states.bucket_bytes,
        passing_bytes=states.passing_bytes,
        copied_bytes=ITEM_BYTES[wide] if states.copies and ITEM_BYTES[wide] < ITEM_BYTES[states.parameters] else 0,
        transport=stack.transport,
        pictures=stack.pictures,
    )


def stack_constants(stack: Stack, calibration: Calibration) -> StackConstants:
    """Return the constants that a stack carries, else the calibrated ones of its name."""
    return stack.constants if stack.constants != StackConstants() else constants_for_stack(calibration, stack.name)


def _constants_for(graph: ModelGraph, host: StackConstants, context: int) -> StackConstants:
    """Return the constants for a model: some are of image networks only, some of context parallelism."""
    if any(is_picture(kind) for kind in graph.kinds.values()):
        host = replace(host, memory=host.pictures or host.memory)
    else:
        host = replace(host, sharing=0.0)
    return replace(host, attention=host.attention * host.ring) if context > 1 else host


def tensor_degrees(kind: LayerKind, devices: int) -> tuple[int, ...]:
    """Return the legal tensor-parallel degrees of a kind on up to ``devices`` devices."""
    largest = min(LARGEST_DEGREE, devices, kind.tensor_degrees)
    return tuple(degree for degree in range(1, largest + 1) if kind.tensor_degrees % degree == 0)


def _offered_settings(graph: ModelGraph, wanted: Collection[Wanted], expert: int) -> Iterator[LayerSetting]:
    for name, degree, split, recompute, count in wanted:
        kind = graph.kinds.get(name)
        if kind is not None and recompute in kind.kept:
            yield LayerSetting(name, count, degree, split, recompute, expert if kind.expert_parameters else 1)


def _all_settings(
    graph: ModelGraph, devices: int, node: int, samples: Sequence[float], gathers_each: bool
) -> Iterator[LayerSetting]:
    for name, kind in graph.kinds.items():
        for by, degree in _channel_splits(kind, min(node, devices), gathers_each):
            for count, recompute in product(samples[::2], kind.kept):
                yield LayerSetting(name, count, recompute=recompute, by=by, shares=degree)
        for expert, degree in product(_expert_degrees(kind, devices), tensor_degrees(kind, devices)):
            for split in (False, True) if kind.sequence_parallel and degree > 1 else (False,):
                counts = (*_sample_shares(kind, devices // degree, degree if split else 1), *samples)
                for count, recompute in product(counts, kind.kept):
                    yield LayerSetting(name, count, degree, split, recompute, expert)


def _expert_degrees(kind: LayerKind, devices: int) -> tuple[int, ...]:
    """Return the numbers of devices that the experts of a kind may be spread over."""
    if not kind.expert_parameters or kind.dims.experts < 2:
        return (1,)
    return tuple(degree for degree in divisors(kind.dims.experts) if degree <= devices)


def _channel_splits(kind: LayerKind, node: int, gathers_each: bool) -> Iterator[tuple[str, int]]:
    """Yield the fields of ``Strategy`` and the degrees that split the channels of convolutions within a node."""
    for by in BY:
        if gathers_each:
            yield from ((by, degree) for degree in divisors(node)[1:] if each_divides(kind, by, degree))
        elif splits_channels(kind, by):
            yield from ((by, degree) for degree in divisors(node)[1:] if divides(kind, by, degree))


def _sample_shares(kind: LayerKind, devices: int, slices: int) -> tuple[float, ...]:
    """Return the shares of a sample, by powers of two, that devices get if they split its tokens or pixels."""
    if splits_pixels(kind):
        most = min(devices, LARGEST_DEGREE)
    elif splits_tokens(kind):
        most = min(kind.dims.sequence // (LEAST_TOKENS * slices), devices)
    else:
        return ()
    return tuple(2.0**-power for power in range(most.bit_length() - 1, 0, -1))


def _points(
    graph: ModelGraph, machines: Sequence[Machine], stack: Stack, settings: Sequence[LayerSetting]
) -> Iterator[LayerPoint]:
    """Yield the point of each setting on the slowest machine."""
    times: dict[LayerSetting, LayerTimes] = {}
    kinds: dict[tuple[str, str, int], LayerKind] = {}
    for setting in settings:
        name, by, shares = key = setting.kind, setting.by, setting.shares
        if key not in kinds:
            kind = graph.kinds[name]
            kinds[key] = sliced_kind(kind, by, shares, stack.pictures.gathers_each) if by else kind
        plain = setting._replace(recompute=Recompute.NONE)
        if plain not in times:
            _, samples, degree, split, _, expert, *_ = setting
            choices = samples, degree, split, expert, stack.early_stop
            candidates = [layer_times(machine, kinds[key], stack.states, *choices) for machine in machines]
            times[plain] = max(candidates, key=lambda item: item.forward.device + item.backward.device)
        yield _point(setting, kinds[key], times[plain])


def _point(setting: LayerSetting, kind: LayerKind, times: LayerTimes) -> LayerPoint:
    """Return the point of a setting; with recomputation, all that a plain layer keeps is live again in backward."""
    _, samples, degree, split, *_ = setting
    kept = kind.kept[setting.recompute].at(degree, split) * samples
    plain = kind.kept.get(Recompute.NONE, kind.kept[setting.recompute]).at(degree, split) * samples
    spared = kind.spared_bytes / degree if degree > 1 else 0.0
    rebuilt = plain + kept if setting.recompute is Recompute.FULL else max(plain, kept)
    return setting.point(
        forward=times.forward.seconds,
        backward=times.backward_with(setting.recompute).seconds,
        kept=round(kept),
        working=round(rebuilt + max(kind.working.at(degree, split) - spared, 0.0) * samples),
        forward_working=round(max(plain, kept) + kind.forward_working.at(degree, split) * samples),
    )
