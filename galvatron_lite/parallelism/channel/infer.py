"""Finds out which convolutions and linears of a layer share outputs, inputs or groups, by running a copy of it.

The copy has no storage and runs as one of the devices would. Modules with weights are split when they are called first,
by whether their input is shared then; so shards go through whatever works channel by channel, and shortcuts, branches
and the order of operators need no guessing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.model.trace.meta import meta_copy
from galvatron_lite.parallelism.channel.apply import (
    CHANNELS,
    CHANNELS_RULES,
    ChannelSharing,
    Weighted,
    channel_dim,
    enter_layer,
    filters_rules,
    is_shared,
    is_weighted,
    leave_layer,
    split_module,
    split_part,
    takes_samples,
)
from galvatron_lite.parallelism.channel.parts import ChannelPlan, OperatorPart
from galvatron_lite.parallelism.sharded.groups import ShapeOnlyAxisGroup
from galvatron_lite.parallelism.sharded.tensor import Call, ShardedTensor, global_shape, specs_of
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.strategy import Strategy


def shared_by(strategy: Strategy) -> tuple[str, int]:
    """Which channels of a layer a strategy shares (``filters`` or ``channels``), and among how many.

    Raises:
        InputError: it shares both.
    """
    if strategy.filters > 1 and strategy.channels > 1:
        raise InputError("filters", strategy.filters, "Share the filters of a layer or its channels, not both.")
    return ("filters", strategy.filters) if strategy.filters > 1 else ("channels", strategy.channels)


def infer_channels(
    layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], by: str, degree: int
) -> ChannelPlan:
    """How the channels of a layer are shared; of those before and after the blocks, of one of their modules.

    Args:
        layer: on any device; not changed or run.
        args: positional inputs of it, in full, on any device; images have (samples, channels, ...).
        kwargs: keyword inputs.
        by: ``filters`` or ``channels``; see ``channel.parts``.
        degree: devices that share them.

    Returns:
        The plan; without ``parts`` where nothing can be split so.

    Raises:
        InputError: the layer mixes shards and full images in a way that has no rule; by ``channels`` what enters or
            leaves has no channels to share.
    """
    with torch.device("meta"), torch.inference_mode(False), torch.enable_grad():
        return _Run(meta_copy(layer), by, ShapeOnlyAxisGroup(degree)).plan(args, kwargs)


@dataclass(slots=True)
class _Run:
    """One run of a copy on the meta device, and what it showed."""

    twin: nn.Module
    by: str
    group: ShapeOnlyAxisGroup
    parts: dict[str, OperatorPart] = field(default_factory=dict)
    met: dict[int, Tensor] = field(default_factory=dict)
    entered: set[int] = field(default_factory=set)

    def plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ChannelPlan:
        rules = filters_rules(self.witness) if self.by == "filters" else CHANNELS_RULES
        sharing = ChannelSharing(self.by, self.group, rules)
        for path, module in list(self.twin.named_modules()):
            if is_weighted(module):
                module.forward = partial(self.first, path, module, sharing)

        def leaf(tensor: Tensor) -> Tensor:
            copied = torch.empty_like(tensor, device="meta")
            return copied.requires_grad_(copied.is_floating_point())

        leaves = map_tensors((tuple(args), dict(kwargs)), leaf)
        self.entered = {id(one) for one in tensors_of(leaves) if one.requires_grad}
        # the layer may write to its arguments, but not to leaves
        full = map_tensors(leaves, torch.clone)
        inputs = _extents(full)
        held = map_tensors(full, partial(_shard_of, group=self.group)) if self.by == "channels" else full
        entered, named = enter_layer(held, sharing, inputs)
        uses = _FullUses(self.twin)
        with uses:
            left = self.twin(*entered, **named)
        outputs = _extents(left)
        leave_layer(left, sharing)
        parameters = dict(self.twin.named_parameters(remove_duplicate=False))
        partial_names = frozenset(name for name, parameter in parameters.items() if id(parameter) in self.met)
        for name in sorted(partial_names):
            if id(parameters[name]) in uses.parameters:
                remedy = "It works on shares of channels and on whole pictures: keep the layer whole."
                raise InputError("parameter", name, remedy)
        return ChannelPlan(self.by, self.group.size, self.parts, partial_names, inputs, outputs)

    def first(
        self, path: str, module: Weighted, sharing: ChannelSharing, tensor: Tensor, *rest: Any, **named: Any
    ) -> Tensor:
        """The first call of a convolution or linear: it is split by its input, and called again."""
        del module.forward
        is_sharded = [spec.dim for spec in specs_of(tensor)] == [channel_dim(module, tensor)]
        part = split_part(module, self.by, is_sharded, self.group.size)
        if part is not OperatorPart.WHOLE and not rest and not named and takes_samples(module, tensor):
            self.parts[path] = part
            split_module(module, part, sharing)
        result: Tensor = module(tensor, *rest, **named)
        return result

    def witness(self, call: Call, met: Sequence[Tensor]) -> None:
        """Note parameters of which each device needs a share only."""
        for tensor in met:
            for leaf in _leaves(tensor):
                if id(leaf) in self.entered:
                    remedy = "Share the channels of this layer in another way, or keep it whole."
                    raise InputError(f"{call.name} of shares and a whole tensor of", tuple(tensor.shape), remedy)
                self.met[id(leaf)] = leaf


def _extents(value: Any) -> tuple[int, ...]:
    return tuple(global_shape(one)[CHANNELS] for one in tensors_of(value) if is_shared(one))


def _shard_of(tensor: Tensor, group: ShapeOnlyAxisGroup) -> Tensor:
    """This device's shard of an image that enters."""
    if not is_shared(tensor):
        return tensor
    start, length = share(tensor.shape[CHANNELS], group.size, group.rank)
    if tensor.shape[CHANNELS] < group.size:
        raise InputError("channels", tensor.shape[CHANNELS], f"{group.size} devices cannot share them; keep it whole.")
    return tensor.narrow(CHANNELS, start, length)


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """What a tensor's gradient flows to in the end."""
    if tensor.requires_grad and tensor.grad_fn is None:
        yield tensor
    seen, open_nodes = set[Any](), [tensor.grad_fn] if tensor.grad_fn else []
    while open_nodes:
        node = open_nodes.pop()
        if hasattr(node, "variable"):
            yield node.variable
        following = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= following
        open_nodes += following


class _FullUses(TorchFunctionMode):
    """Notes parameters that work on full activations: their gradients are complete on every device.

    Args:
        twin: the layer; what is computed of its parameters and buffers alone is no activation.
    """

    def __init__(self, twin: nn.Module) -> None:
        super().__init__()
        self.parameters = set[int]()
        self._weights: dict[int, Tensor] = {id(one): one for one in (*twin.parameters(), *twin.buffers())}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = list(tensors_of((args, kwargs or {})))
        weights = [tensor for tensor in tensors if id(tensor) in self._weights]
        if tensors and len(weights) == len(tensors):
            self._weights.update((id(one), one) for one in tensors_of(result))
        elif not any(isinstance(tensor, ShardedTensor) for tensor in tensors):
            self.parameters.update(id(leaf) for weight in weights for leaf in _leaves(weight))
        return result
