"""Split the pixels of a module: its forward runs on sharded tensors, and its hooks see plain tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from galvatron_lite.model.batch import map_places, places
from galvatron_lite.parallelism.sharded.collectives import enter, gather_dims, leave
from galvatron_lite.parallelism.sharded.groups import AxisGroup
from galvatron_lite.parallelism.sharded.indexing import rows_stay
from galvatron_lite.parallelism.sharded.tensor import (
    Rules,
    ShardSpecs,
    from_local,
    locals_only,
    specs_of,
    to_local,
    unwrap,
    wrap_locals,
)
from galvatron_lite.parallelism.spatial.convolution import ShardedConvolution
from galvatron_lite.parallelism.spatial.norms import ShardedBatchNorm

SPECS = "galvatron_specs"
"""Name of the argument of a split module with the specs of its other arguments."""


class SpecsAt:
    """The specs of sharded tensors in nested arguments, by their place (see ``map_places``).

    It is no dataclass or mapping, as ZeRO's hooks rebuild those with tensors of another precision, while groups are
    compared by identity.
    """

    def __init__(self, places: Mapping[str, ShardSpecs]) -> None:
        self.places = places


def split_pixels(module: nn.Module, groups: Sequence[AxisGroup], rules: Rules) -> None:
    """Make a module work on shards of images, in place.

    Its forward then takes plain tensors, this rank's shards, and their specs in the argument ``SPECS``. It returns
    plain tensors and their specs: (output, ``SpecsAt``). So hooks, ZeRO and recomputation see plain tensors, and
    recomputation gets the same arguments again.

    Full tensors have a complete gradient on every rank outside the module, and a part of it inside (see
    ``sharded.tensor``).

    Args:
        module: its parameters stay full.
        groups: ranks that shard images in it.
        rules: of the sharded tensors inside.
    """
    if rules.handlers.keys() >= {"conv2d", "batch_norm"}:
        bind_modules(module)
    module.forward = _on_shards(module.forward, tuple(groups), rules)


def bind_modules(module: nn.Module) -> None:
    """Replace the classes of convolutions and batch norms within a module by those for sharded images, in place."""
    for child in module.modules():
        kind = _SHARDED_KINDS.get(type(child))
        if kind is not None and "forward" not in vars(child):
            child.__class__ = kind


_SHARDED_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    kind: type(f"Sharded{kind.__name__}", (base, kind), {})
    for base, kinds in (
        (ShardedConvolution, (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
        (ShardedBatchNorm, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)),
    )
    for kind in kinds
}


def _on_shards(forward: Callable[..., Any], groups: Sequence[AxisGroup], rules: Rules) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> tuple[Any, SpecsAt]:
        specs: Mapping[str, ShardSpecs] = kwargs.pop(SPECS).places if SPECS in kwargs else {}

        def inside(place: str, tensor: Tensor) -> Tensor:
            return entering(tensor, specs.get(place, ()), groups, rules)

        args, kwargs = map_places((args, kwargs), inside)
        with rows_stay():
            output = forward(*args, **kwargs)
        output = map_places(output, lambda _, tensor: settled(tensor, groups))
        leaving = {place: specs_of(tensor) for place, tensor in places(output) if specs_of(tensor)}

        def outside(place: str, tensor: Tensor) -> Tensor:
            # no view: code after the module may change the tensor in place, and autograd would then drop hooks on a
            # view, such as those of ZeRO
            plain = unwrap(tensor) if place in leaving else tensor
            return leave(plain, _others(leaving.get(place, ()), groups)) if plain.requires_grad else plain

        return map_places(output, outside), SpecsAt(leaving)

    return run


def entering(tensor: Tensor, specs: ShardSpecs, groups: Iterable[AxisGroup], rules: Rules) -> Tensor:
    """Turn a plain tensor into a sharded one for code in which gradients are parts on ranks that do not shard it."""
    if tensor.requires_grad:
        tensor = enter(tensor, _others(specs, groups))
    # an alias, so that other references stay plain
    return from_local(tensor.view_as(tensor), specs, rules) if specs else tensor


def settled(tensor: Tensor, groups: Sequence[AxisGroup]) -> Tensor:
    """Gather a tensor of such code along dims that other groups shard (such as ``OrderedGroup``)."""
    foreign = [spec for spec in specs_of(tensor) if not any(spec.group is group for group in groups)]
    if not foreign:
        return tensor
    kept = tuple(spec for spec in specs_of(tensor) if spec not in foreign)
    with locals_only():
        return wrap_locals(gather_dims(tensor, foreign), kept, tensor.rules)  # type: ignore[attr-defined, no-any-return]


def leaving(tensor: Tensor, groups: Sequence[AxisGroup]) -> Tensor:
    """Turn a tensor of such code into a plain one, whose gradient is complete on every rank with the same items."""
    tensor = settled(tensor, groups)
    plain = to_local(tensor)
    return leave(plain, _others(specs_of(tensor), groups)) if plain.requires_grad else plain


def _others(specs: ShardSpecs, groups: Iterable[AxisGroup]) -> list[AxisGroup]:
    """The groups that do not shard a tensor."""
    sharding = {id(spec.group) for spec in specs}
    return [group for group in groups if id(group) not in sharding]
