"""Makes a module work on its shard of images: its forward runs on sharded tensors, its hooks see plain ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from galvatron_lite.model.batch import map_places, places
from galvatron_lite.parallelism.sharded.collectives import enter, gather_dims, leave
from galvatron_lite.parallelism.sharded.groups import AxisGroup
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
"""Name of the argument that tells a split module how its other arguments are sharded."""


class SpecsAt:
    """How tensors of a nest are sharded, by place (see ``map_places``); full ones are left out.

    No dataclass or mapping: ZeRO's hooks rebuild those with tensors in another precision; groups are compared by
    identity.
    """

    def __init__(self, places: Mapping[str, ShardSpecs]) -> None:
        self.places = places


def split_pixels(module: nn.Module, groups: Sequence[AxisGroup], rules: Rules) -> None:
    """Make a module work on shards of images, in place.

    Its forward then takes plain tensors, this rank's shards, and under the name ``SPECS`` how they are sharded; it
    returns its output as plain tensors, and how those are sharded: (output, ``SpecsAt``). So hooks, ZeRO and
    recomputation see plain tensors, and what recomputation runs again has the same arguments.

    Full tensors have a complete gradient outside, on every rank, and a part of it inside (see ``sharded.tensor``).

    Args:
        module: any; its parameters stay full.
        groups: ranks that share images in it.
        rules: what functions do inside.
    """
    if rules.handlers.keys() >= {"conv2d", "batch_norm"}:
        bind_modules(module)
    module.forward = _on_shards(module.forward, tuple(groups), rules)


def bind_modules(module: nn.Module) -> None:
    """Make torch's convolutions and batch norms within a module ones that know sharded tensors, in place."""
    for one in module.modules():
        kind = _SHARDED_KINDS.get(type(one))
        if kind is not None and "forward" not in vars(one):
            one.__class__ = kind


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
        output = map_places(forward(*args, **kwargs), lambda _, tensor: settled(tensor, groups))
        leaving = {place: specs_of(tensor) for place, tensor in places(output) if specs_of(tensor)}

        def outside(place: str, tensor: Tensor) -> Tensor:
            # Itself made plain again, with no view between: code behind the module may change its input in place, and
            # autograd would then forget hooks on a view, those of ZeRO among them.
            plain = unwrap(tensor) if place in leaving else tensor
            return leave(plain, _others(leaving.get(place, ()), groups)) if plain.requires_grad else plain

        return map_places(output, outside), SpecsAt(leaving)

    return run


def entering(tensor: Tensor, specs: ShardSpecs, groups: Iterable[AxisGroup], rules: Rules) -> Tensor:
    """A plain tensor for code in which gradients are parts on the ranks of groups that do not shard it."""
    if tensor.requires_grad:
        tensor = enter(tensor, _others(specs, groups))
    # an alias: whoever holds the tensor keeps a plain one
    return from_local(tensor.view_as(tensor), specs, rules) if specs else tensor


def settled(tensor: Tensor, groups: Sequence[AxisGroup]) -> Tensor:
    """A tensor of such code, gathered along dims that groups of another order shard (see ``sharded.groups``)."""
    strange = [spec for spec in specs_of(tensor) if not any(spec.group is group for group in groups)]
    if not strange:
        return tensor
    kept = tuple(spec for spec in specs_of(tensor) if spec not in strange)
    with locals_only():
        return wrap_locals(gather_dims(tensor, strange), kept, tensor.rules)  # type: ignore[attr-defined, no-any-return]


def leaving(tensor: Tensor, groups: Sequence[AxisGroup]) -> Tensor:
    """A tensor of such code as a plain one whose gradient is complete on every rank that holds the same."""
    tensor = settled(tensor, groups)
    plain = to_local(tensor)
    return leave(plain, _others(specs_of(tensor), groups)) if plain.requires_grad else plain


def _others(specs: ShardSpecs, groups: Iterable[AxisGroup]) -> list[AxisGroup]:
    """The groups that do not shard a tensor."""
    sharding = {id(spec.group) for spec in specs}
    return [group for group in groups if id(group) not in sharding]
