"""Splits the channels of a layer over devices: slices weights in place and replaces forwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.parallelism.channel.parts import ChannelPlan, OperatorPart
from galvatron_lite.parallelism.sharded import metadata, shapes
from galvatron_lite.parallelism.sharded.calls import on_full, refuse_write
from galvatron_lite.parallelism.sharded.collectives import (
    distribute,
    enter,
    full_replica,
    full_tensor,
    leave,
    local_part,
    scatter_sum,
)
from galvatron_lite.parallelism.sharded.groups import AxisGroup
from galvatron_lite.parallelism.sharded.rules import COMMON
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Handler,
    Rules,
    ShardedTensor,
    ShardSpec,
    from_local,
    global_shape,
    in_place,
    locals_only,
    sharded_tensors,
    specs_of,
    to_local,
    unwrap,
)
from galvatron_lite.parallelism.spatial import norms, pooling, resizing
from galvatron_lite.parallelism.tensor.apply import Shards, shards_by_name, slice_parameter
from galvatron_lite.parallelism.tensor.functions import reduce_from_group
from galvatron_lite.parallelism.tensor.shards import ParameterShard, Placement

# The rules of images whose channels are sharded.


HANDLERS: Mapping[str, Handler] = {**COMMON, **resizing.HANDLERS, **pooling.HANDLERS, **norms.HANDLERS}
"""Handlers for which each rank has a part of the gradient of a full tensor."""

CHANNELS_RULES = Rules(HANDLERS, on_full, ("channels",))
"""The rules of ``channels``, under which every image is sharded."""


def is_image(tensor: Tensor, dims: int) -> bool:
    """Whether a full tensor that meets shards of ``dims`` dims counts as computed from the layer's input.

    Parameters and tensors of fewer dims do not: each rank has a part of their gradient. Whether a tensor requires a
    gradient does not count, as that may differ between the run that finds which gradients are partial and later runs.
    """
    return tensor.dim() == dims and not isinstance(tensor, nn.Parameter)


Witness = Callable[[Call, list[Tensor]], None]
"""Is called with a call of shards and full tensors, and the full tensors among its arguments that are no images."""


def filters_rules(witness: Witness = lambda _call, _met: None) -> Rules:
    """Return the rules of ``filters``, under which every rank has the complete gradient of full tensors.

    If a full image meets shards of another (a shortcut), these are gathered, as they would be later. For the handlers
    that all rules share, gradients of full tensors are parts; so ``enter`` and ``leave`` wrap arguments and results.
    """
    table: dict[str, Handler] = {}
    rules = Rules(table, _on_full, ("filters",))
    inner = Rules(HANDLERS, lambda _call: _NO_RULE, ("filters",))
    table |= {name: _complete(handler, inner, witness) for name, handler in HANDLERS.items()}
    table |= metadata.METADATA
    table |= {name: _joined(table[name]) for name in shapes.JOINS.split()}
    return rules


_NO_RULE = object()


def _on_full(call: Call) -> Any:
    """Call the function with full tensors; raise InputError if it would write to shards."""
    refuse_write(call)
    return _call_full(call)


def _call_full(call: Call) -> Any:
    return call.function(*map_tensors(call.args, full_replica), **map_tensors(call.kwargs, full_replica))


def _joined(handler: Handler) -> Handler:
    """``cat`` of shards along the channels is of full images, which are gathered later anyway."""
    return lambda call: _call_full(call) if shapes.joins_shards(call) else handler(call)


def _complete(handler: Handler, inner: Rules, witness: Witness) -> Handler:
    def handle(call: Call) -> Any:
        full = [tensor for tensor in tensors_of((call.args, call.kwargs)) if not isinstance(tensor, ShardedTensor)]
        first = next(sharded_tensors((call.args, call.kwargs)))
        dims, (spec, *_) = len(global_shape(first)), first.specs
        images = [tensor for tensor in full if is_image(tensor, dims)]
        if call.name != "__setitem__" and any(image.shape[spec.dim] > 1 for image in images):
            return _write_back(call, _call_full(call))  # an image with all channels is among the arguments

        def entered(tensor: Tensor) -> Tensor:
            enters = not isinstance(tensor, ShardedTensor) and is_image(tensor, dims)
            return enter(tensor, [spec.group]) if enters else tensor

        def left(tensor: Tensor) -> Tensor:
            if isinstance(tensor, ShardedTensor):
                tensor.rules = call.rules
                return tensor
            return leave(tensor, [spec.group]) if tensor.requires_grad else tensor

        args, kwargs = map_tensors((call.args, call.kwargs), entered) if images else call[2:4]
        result = handler(call._replace(args=args, kwargs=kwargs, rules=inner))
        if result is _NO_RULE:
            return call.rules.otherwise(call)
        witness(call, [tensor for tensor in full if not is_image(tensor, dims)])
        return map_tensors(result, left)

    return handle


def _write_back(call: Call, result: Tensor) -> Tensor:
    """Copy a full result into the shard that an in-place function writes to, as it may have other references."""
    if in_place(call) and isinstance(call.args[0], ShardedTensor):
        shards = call.args[0]
        (spec,) = shards.specs
        part = local_part(enter(result, (spec.group,)), spec)
        with locals_only():
            shards.copy_(part)
    return result


Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Weighted = nn.Linear | Convolution | Transposed
"""Modules that can be split."""

CHANNELS = 1
"""Dim of the channels in a layer's inputs and outputs."""

_FUNCTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: functional.linear,
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
    nn.ConvTranspose1d: functional.conv_transpose1d,
    nn.ConvTranspose2d: functional.conv_transpose2d,
    nn.ConvTranspose3d: functional.conv_transpose3d,
}


def shard_channels(layer: nn.Module, plan: ChannelPlan, group: AxisGroup) -> dict[str, ParameterShard]:
    """Split the channels of a layer over a group of devices, in place.

    Parameters stay the same objects and hold the local slice, as in ``tensor.apply.shard_layer``. Weights of
    convolutions and linears are sliced; biases, norms and other parameters stay full. Under ``filters`` inputs and
    outputs of the layer are full, and gradients of replicas are complete. Under ``channels`` every floating-point
    input and output with two dims or more is this device's shard along dim 1.

    Args:
        layer: a block, or a module before or after the blocks.
        plan: from ``infer_channels``.
        group: the devices.

    Returns:
        The shard of each parameter, by its name in ``layer``, or by each of its names.

    Raises:
        InputError: the plan is for another number of devices.
    """
    if group.size != plan.degree:
        raise InputError(plan.by, group.size, f"Use a plan for {group.size} devices, or {plan.degree} devices.")
    sharing = ChannelSharing(plan.by, group, filters_rules() if plan.by == "filters" else CHANNELS_RULES)
    shards: Shards = {}
    if group.size > 1:
        for path, part in plan.parts.items():
            weighted: Weighted = layer.get_submodule(path)  # type: ignore[assignment]
            shards |= split_module(weighted, part, sharing)
        # other code, such as checkpointing, sees plain tensors
        layer.forward = partial(_forward, layer.forward, sharing, plan.inputs)
    parameters = layer.named_parameters(remove_duplicate=False)
    return shards_by_name(parameters, shards, group, lambda name: plan.by == "channels" or name in plan.partial)


@dataclass(frozen=True, slots=True)
class ChannelSharing:
    """The split of a layer's channels."""

    by: str  # ``filters`` or ``channels``
    group: AxisGroup  # the devices
    rules: Rules

    def full(self, tensor: Tensor) -> Tensor:
        """Gather a tensor; under ``filters`` every device has its complete gradient, else a part."""
        return full_replica(tensor) if self.by == "filters" else full_tensor(tensor)

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this device's shard of a full tensor."""
        entered = enter(tensor, (self.group,)) if self.by == "filters" else tensor
        return distribute(entered, (ShardSpec(dim, tensor.shape[dim], self.group),), self.rules)

    def local(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this device's shard of a full or sharded tensor, as a plain tensor."""
        if any(spec.dim != dim for spec in specs_of(tensor)):
            tensor = self.full(tensor)
        return to_local(tensor if specs_of(tensor) else self.shard(tensor, dim))


# Inputs and outputs of a layer: plain tensors outside, sharded ones inside


def _forward(
    forward: Callable[..., Any], sharing: ChannelSharing, extents: Sequence[int], *args: Any, **kwargs: Any
) -> Any:
    entered, named = enter_layer((args, kwargs), sharing, extents)
    return leave_layer(forward(*entered, **named), sharing)


def is_shared(tensor: Tensor) -> bool:
    """Whether an input or output of a layer under ``channels`` is an image: floats for samples and channels."""
    return tensor.is_floating_point() and tensor.dim() > CHANNELS


def enter_layer(value: Any, sharing: ChannelSharing, extents: Sequence[int]) -> Any:
    """Turn the arguments of a layer into sharded tensors.

    Args:
        value: nested arguments. Under ``filters`` they are full; under ``channels`` images are this device's shards.
        sharing: of the layer.
        extents: channels of the images, in order.

    Raises:
        InputError: more or fewer images than extents; a shard of another length.
    """
    if sharing.by == "filters":
        return value
    channels = iter(extents)

    def entered(tensor: Tensor) -> Tensor:
        if not is_shared(tensor):
            return tensor
        spec = ShardSpec(CHANNELS, next(channels, 0), sharing.group)
        # an alias, so that code outside keeps a plain tensor
        return from_local(tensor.view_as(tensor), (spec,), sharing.rules)

    return map_tensors(value, entered)


def leave_layer(value: Any, sharing: ChannelSharing) -> Any:
    """Turn the output of a layer into plain tensors: full under ``filters``, shards under ``channels``.

    Raises:
        InputError: under ``channels``, an output without channels.
    """
    if sharing.by == "filters":
        shared = next(sharded_tensors(value), None) is not None
        return map_tensors(value, sharing.full) if shared else value

    def left(tensor: Tensor) -> Tensor:
        if [spec.dim for spec in specs_of(tensor)] == [CHANNELS]:
            # no view: ZeRO's hooks must stay if later code changes the tensor in place
            return unwrap(tensor)
        if not is_shared(tensor):
            remedy = "It has no channels that devices could share: keep the layer whole, or share its filters."
            raise InputError("result of a layer with shared channels", tuple(tensor.shape), remedy)
        return to_local(sharing.shard(sharing.full(tensor), CHANNELS))

    return map_tensors(value, left)


# Convolutions and linears


@dataclass(frozen=True, slots=True)
class ModuleChannels:
    """The channels of a convolution or linear, and their dims in its weight."""

    inputs: int
    outputs: int
    groups: int  # of the convolution, one after another along dim 0 of the weight
    input_dim: int
    output_dim: int


def is_weighted(module: nn.Module) -> bool:
    """Whether a module is a convolution or linear of torch, with its forward and a plain weight."""
    kind = next((kind for kind in _FUNCTIONS if isinstance(module, kind)), None)
    if kind is None or type(module).forward is not kind.forward or "forward" in vars(module):
        return False
    return any(name == "weight" for name, _ in module.named_parameters(recurse=False))


def _channels_of(module: Weighted) -> ModuleChannels:
    """The channels of an unsplit convolution or linear."""
    if isinstance(module, nn.Linear):
        return ModuleChannels(module.in_features, module.out_features, 1, 1, 0)
    transposed = isinstance(module, Transposed)
    return ModuleChannels(module.in_channels, module.out_channels, module.groups, 1 - transposed, int(transposed))


def channel_dim(module: Weighted, tensor: Tensor) -> int:
    """Return the dim of the channels, counted from the front, in an input or output of a module."""
    return tensor.dim() - 1 if isinstance(module, nn.Linear) else 1


def takes_samples(module: Weighted, tensor: Tensor) -> bool:
    """Whether a module's input has a dim of samples, so that its channels are at ``channel_dim``."""
    return tensor.dim() >= 2 if isinstance(module, nn.Linear) else tensor.dim() == module.weight.dim()


def split_part(module: Weighted, by: str, is_sharded: bool, degree: int) -> OperatorPart:
    """Return the part of a convolution or linear that a device runs; ``is_sharded``: whether its input is."""
    channels = _channels_of(module)
    if channels.groups > 1:
        # shards must be complete groups: these divide evenly, or each is one channel
        single = channels.inputs == channels.outputs == channels.groups
        fits = channels.groups >= degree and (single or channels.groups % degree == 0)
        return OperatorPart.SHARED if is_sharded and fits else OperatorPart.WHOLE
    if by == "channels":
        return OperatorPart.SCATTERED if min(channels.inputs, channels.outputs) >= degree else OperatorPart.WHOLE
    if is_sharded:
        return OperatorPart.CHANNELS
    return OperatorPart.FILTERS if channels.outputs >= degree else OperatorPart.WHOLE


def split_module(module: Weighted, part: OperatorPart, sharing: ChannelSharing) -> Shards:
    """Slice a module's weight in place and replace its forward by one for shards.

    Returns:
        The shards of its parameters, by their identity.
    """
    channels, group = _channels_of(module), sharing.group
    match part:
        case OperatorPart.FILTERS:
            dim, extent = channels.output_dim, channels.outputs
        case OperatorPart.CHANNELS | OperatorPart.SCATTERED:
            dim, extent = channels.input_dim, channels.inputs
        case OperatorPart.SHARED:
            dim, extent = 0, (channels.inputs, channels.outputs)[channels.output_dim == 0]
        case _:
            raise InputError("part", part, "Split outputs, inputs, or groups.")
    shards: Shards = {}
    slice_parameter(module.weight, dim, (extent,), group, shards)
    if module.bias is not None:
        summed = part is OperatorPart.CHANNELS
        placement = Placement.REPLICATED if summed else Placement.PARTIAL
        shards[id(module.bias)] = ParameterShard(placement, tuple(module.bias.shape), group.size, group.rank)
    module.forward = partial(_run_split, module, part, channels, sharing)  # type: ignore[method-assign]
    return shards


def _run_split(
    module: Weighted, part: OperatorPart, channels: ModuleChannels, sharing: ChannelSharing, tensor: Tensor
) -> Tensor:
    """Run a split module; the bias is added to complete sums."""
    dim = channel_dim(module, tensor)
    spec = ShardSpec(dim, channels.outputs, sharing.group)
    if part is OperatorPart.FILTERS:
        local = enter(sharing.full(tensor), (sharing.group,))
    else:
        local = sharing.local(tensor, dim)
    if part is OperatorPart.CHANNELS:
        summed = reduce_from_group(_run(module, local, None, 1), sharing.group)
        return _with_bias(module, summed, module.bias)
    bias = None if module.bias is None else module.bias.narrow(0, spec.start, spec.length)
    if part is OperatorPart.SCATTERED:
        output = _with_bias(module, scatter_sum(_run(module, local, None, 1), spec), bias)
    else:
        groups = channels.groups * local.shape[dim] // channels.inputs if part is OperatorPart.SHARED else 1
        output = _run(module, local, bias, groups)
    return from_local(output, (spec,), sharing.rules)


def _with_bias(module: Weighted, output: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return output
    sides = 0 if isinstance(module, nn.Linear) else output.dim() - 2
    return output + bias.view(-1, *[1] * sides).to(output.dtype)


def _run(module: Weighted, tensor: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Run a module with its local weight, and another bias and number of groups."""
    function = next(function for kind, function in _FUNCTIONS.items() if isinstance(module, kind))
    if isinstance(module, nn.Linear):
        return function(tensor, module.weight, bias)
    if isinstance(module, Transposed):
        sides = (module.stride, module.padding, module.output_padding)
        return function(tensor, module.weight, bias, *sides, groups, module.dilation)
    padding = module.padding
    if module.padding_mode != "zeros":
        pads = module._reversed_padding_repeated_twice  # as ``functional.pad`` takes it
        tensor, padding = functional.pad(tensor, pads, module.padding_mode), "valid"
    return function(tensor, module.weight, bias, module.stride, padding, module.dilation, groups)
