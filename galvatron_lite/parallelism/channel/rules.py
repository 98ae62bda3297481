"""What functions do with images whose channels are shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.parallelism.sharded import metadata, shapes
from galvatron_lite.parallelism.sharded.calls import in_place, on_full, refuse_write
from galvatron_lite.parallelism.sharded.collectives import enter, full_replica, leave, local_part
from galvatron_lite.parallelism.sharded.rules import COMMON
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Handler,
    Rules,
    ShardedTensor,
    global_shape,
    locals_only,
    sharded_tensors,
)
from galvatron_lite.parallelism.spatial import norms, pooling, resizing

HANDLERS: Mapping[str, Handler] = {**COMMON, **resizing.HANDLERS, **pooling.HANDLERS, **norms.HANDLERS}
"""In which gradients of full tensors are parts on each rank."""

CHANNELS_RULES = Rules(HANDLERS, on_full, ("channels",))
"""By ``channels``: every image is shared."""


def is_image(tensor: Tensor, dims: int) -> bool:
    """Whether a full tensor that meets shards of ``dims`` dims counts as made from the layer's input.

    Parameters do not, nor do tensors of fewer dims: of these each rank's gradient is a part. Whether one takes a
    gradient does not matter, as that may change from the run that told which are partial to the others.
    """
    return tensor.dim() == dims and not isinstance(tensor, nn.Parameter)


Witness = Callable[[Call, list[Tensor]], None]
"""Is called with calls that shards and full tensors meet in, and those of the latter that are no images."""


def filters_rules(witness: Witness = lambda _call, _met: None) -> Rules:
    """By ``filters``: gradients of full tensors are complete on every rank.

    A full image and shards of another (a shortcut) meet as full images, as both must be so in the end. The other
    handlers take gradients of full tensors for parts; so their full arguments are entered, and their results left.
    """
    table: dict[str, Handler] = {}
    rules = Rules(table, _on_full, ("filters",))
    inner = Rules(HANDLERS, lambda _call: _GIVEN_UP, ("filters",))
    table |= {name: _complete(handler, inner, witness) for name, handler in HANDLERS.items()}
    table |= metadata.METADATA
    table |= {name: _joined(table[name]) for name in shapes.JOINS.split()}
    return rules


_GIVEN_UP = object()


def _on_full(call: Call) -> Any:
    """Raises InputError where the function would write to shards."""
    refuse_write(call)
    return _call_full(call)


def _call_full(call: Call) -> Any:
    return call.function(*map_tensors(call.args, full_replica), **map_tensors(call.kwargs, full_replica))


def _joined(handler: Handler) -> Handler:
    """``cat`` of shards along the channels: of full images, as each is gathered in the end."""
    return lambda call: _call_full(call) if shapes.joins_shards(call) else handler(call)


def _complete(handler: Handler, inner: Rules, witness: Witness) -> Handler:
    def handle(call: Call) -> Any:
        full = [one for one in tensors_of((call.args, call.kwargs)) if not isinstance(one, ShardedTensor)]
        if full and _needs_full(call, full):
            return _written(call, _call_full(call))
        return _on_shards(handler, inner, call, full, witness)

    return handle


def _needs_full(call: Call, full: list[Tensor]) -> bool:
    """Whether a full image with all channels is among the arguments, and the result may be full, too."""
    if call.name == "__setitem__":
        return False
    first = next(sharded_tensors((call.args, call.kwargs)))
    dims, spec = len(global_shape(first)), first.specs[0]
    return any(is_image(one, dims) and one.shape[spec.dim] > 1 for one in full)


def _written(call: Call, result: Tensor) -> Tensor:
    """A full result; shards that a function writes to (``+=`` too) may have other names, and get it as well."""
    if in_place(call) and isinstance(call.args[0], ShardedTensor):
        shards = call.args[0]
        (spec,) = shards.specs
        part = local_part(enter(result, (spec.group,)), spec)
        with locals_only():
            shards.copy_(part)
    return result


def _on_shards(handler: Handler, inner: Rules, call: Call, full: list[Tensor], witness: Witness) -> Any:
    first = next(sharded_tensors((call.args, call.kwargs)))
    dims, groups = len(global_shape(first)), [first.specs[0].group]

    def entered(tensor: Tensor) -> Tensor:
        enters = not isinstance(tensor, ShardedTensor) and is_image(tensor, dims)
        return enter(tensor, groups) if enters else tensor

    def left(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedTensor):
            tensor.rules = call.rules
            return tensor
        return leave(tensor, groups) if tensor.requires_grad else tensor

    args, kwargs = (map_tensors(call.args, entered), map_tensors(call.kwargs, entered)) if full else call[2:4]
    result = handler(call._replace(args=args, kwargs=kwargs, rules=inner))
    if result is _GIVEN_UP:
        return call.rules.otherwise(call)
    witness(call, [one for one in full if not is_image(one, dims)])
    return map_tensors(result, left)
