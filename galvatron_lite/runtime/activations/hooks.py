"""Hooks that convert the inputs of a stage's layers to the layout and precision of the layer.

A layer's output stays in the layer's layout until another layer takes it, or glue code reads it (``LayoutTensor``). So
it moves once, and skip connections between layers of different layouts need no rules of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.model.batch import map_places, tensors_of
from galvatron_lite.model.graph import Role
from galvatron_lite.parallelism.channel.apply import is_shared
from galvatron_lite.parallelism.sharded.collectives import enter
from galvatron_lite.parallelism.sharded.tensor import ShardSpec, ShardSpecs
from galvatron_lite.parallelism.spatial.apply import SPECS, SpecsAt
from galvatron_lite.parallelism.tensor.functions import copy_to_group
from galvatron_lite.runtime.activations.layout import IDS, INNER, ActivationLayout, AxisSplit
from galvatron_lite.runtime.activations.traffic import ActivationRedistributor, BoundaryLayout, LayoutTensor, RankPiece
from galvatron_lite.runtime.assignment import LayerAssignment

UserHooks = Mapping[str, tuple[Sequence[int], Sequence[int]]]
"""By path of a module, the keys of the forward pre-hooks and the forward hooks that its user registered."""


def hooks_of(model: nn.Module) -> UserHooks:
    """The present hooks of all modules. torch has no public function for this; the two dicts are as old as hooks."""
    return {path: (tuple(one._forward_pre_hooks), tuple(one._forward_hooks)) for path, one in model.named_modules()}


def install_hooks(
    model: nn.Module,
    stage: Sequence[LayerAssignment],
    borders: Mapping[str, BoundaryLayout],
    traffic: ActivationRedistributor,
    incoming: Collection[ActivationLayout],
    users: UserHooks = MappingProxyType({}),
) -> None:
    """Register hooks of a stage's layers where layouts or precision differ.

    Call it after every other hook of the layers is registered: conversion precedes ZeRO's hooks. The user's hooks see
    what glue code sees: they run before inputs are converted, and after outputs are. ``borders`` are by path of a
    module, ``incoming`` are the layouts that tensors from earlier stages may have.
    """
    layouts = {*incoming, *(border.layout for border in borders.values())}
    layouts_differ = layouts != {traffic.glue} or bool(traffic.border.lines)
    for layer, path in [(placed.layer, path) for placed in stage for path in placed.layer.modules]:
        casts, border = traffic.compute is not None and layer.role is Role.BLOCK, borders[path]
        module = model.get_submodule(path)
        if type(module).forward is nn.Module.forward:  # a ParameterList
            for parameter in module.parameters():
                traffic.count_as_read_by_layer(parameter, border.layout)
        if layouts_differ or casts:
            entry = _Entry(traffic, border, layer.name, traffic.compute if casts else None, layouts_differ)
            module.register_forward_pre_hook(entry, prepend=True, with_kwargs=True)
        if border.layout != traffic.glue or border.lines:
            module.register_forward_hook(_Exit(traffic, border))
        before, after = users.get(path, ((), ()))
        # torch has no public function that changes the order of hooks
        for key in reversed(before):
            module._forward_pre_hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]
        for key in after:
            module._forward_hooks.move_to_end(key)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Entry:
    """Pre-hook of a layer. The first floating-point tensor is the hidden state; pixels of pictures of its rank are
    sharded.

    Where ranks share tokens, each takes its part of the hidden state, or else of ids. Other arguments stay complete.
    """

    traffic: ActivationRedistributor
    border: BoundaryLayout
    layer: str
    compute: torch.dtype | None
    layouts_differ: bool  # else lists and dicts, which the layer may write to, are passed as they are

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = next((tensor for tensor in tensors_of((args, kwargs)) if tensor.is_floating_point()), None)
        sampled = self.traffic.sampled.get(self.layer, {})
        cuts: dict[str, ShardSpecs] = {}

        def convert(place: str, tensor: Tensor) -> Tensor:
            piece = self.traffic.piece(tensor, sampled.get(place))
            if piece is None:
                return self._cached(tensor, self.border.layout, lambda: self._sum_gradient(self._unsampled(tensor)))
            target = self._target(piece.shape, tensor, hidden)
            if cut := self.border.cuts(target, piece.shape):
                cuts[place] = cut

            def move() -> Tensor:
                return self.traffic.mover(self._cast(piece.tensor), piece.split, target, piece.shape)

            return move() if tensor is hidden else self._cached(tensor, target, lambda: self._sum_gradient(move()))

        if self.layouts_differ:
            args, kwargs = map_places((args, kwargs), convert)
        else:
            args = tuple(_map_plain(item, convert, f".0.{place}") for place, item in enumerate(args))
            kwargs = {name: _map_plain(item, convert, f".1.{name}") for name, item in kwargs.items()}
        return args, {**kwargs, SPECS: SpecsAt(cuts)} if self.border.lines else kwargs

    def _target(self, shape: tuple[int, ...], tensor: Tensor, hidden: Tensor | None) -> AxisSplit:
        layout = self.border.layout
        if hidden is None and layout.tokens > 1 and len(shape) == IDS:
            return AxisSplit(layout.devices, (*layout.samples(shape).axes[:INNER], layout.token_axis))
        is_like_hidden = layout.splits_pixels and hidden is not None and len(shape) == hidden.dim()
        if self.border.channels is not None:
            is_like_hidden = is_shared(tensor)
        return layout.hidden(shape) if tensor is hidden or is_like_hidden else layout.samples(shape)

    def _unsampled(self, tensor: Tensor) -> Tensor:
        full = self._cast(self.traffic.unsampled_to_layer(tensor, self.border.layout))
        line = self.border.channels
        if line is None or not is_shared(full):
            return full
        cut = ShardSpec(INNER, full.shape[INNER], line)
        return enter(full, [line]).narrow(INNER, cut.start, cut.length)

    def _sum_gradient(self, tensor: Tensor) -> Tensor:
        """Sum the gradient of a tensor that ranks use with their shares of the tokens."""
        group = self.border.matmuls
        return tensor if group is None or not tensor.requires_grad else copy_to_group(tensor, group)

    def _cached(self, tensor: Tensor, key: object, convert: Callable[[], Tensor]) -> Tensor:
        """Convert a glue tensor that several layers may take (a mask, positions) once a micro-batch."""
        if isinstance(tensor, LayoutTensor):
            return convert()
        cache, place = self.traffic.cache, (id(tensor), (key, self.border.matmuls))
        if place not in cache:
            # the original is kept too, so that no other tensor gets its identity
            with torch.enable_grad():
                cache[place] = (tensor, convert())
        return cache[place][1]

    def _cast(self, tensor: Tensor) -> Tensor:
        compute = self.compute
        return tensor if compute is None or not tensor.is_floating_point() else tensor.to(compute)


def _map_plain(item: Any, convert: Callable[[str, Tensor], Tensor], place: str) -> Any:
    return item if isinstance(item, (list, dict)) else map_places(item, convert, place)


@dataclass(frozen=True, slots=True)
class _Exit:
    """Hook of a layer, which prepares its output for the code behind it."""

    traffic: ActivationRedistributor
    border: BoundaryLayout

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        cuts: Mapping[str, ShardSpecs] = {}
        if self.border.lines:
            output, specs = output
            cuts = specs.places
        hidden, layout = next(tensors_of(output), None), self.border.layout
        channel_counts = iter(self.border.outputs)

        def convert(place: str, tensor: Tensor) -> Tensor:
            if self.border.channels is not None and is_shared(tensor):
                channels = next(channel_counts, None) or tensor.shape[INNER] * layout.channels
                shape = (self.traffic.rows, channels, *tensor.shape[INNER + 1 :])
                return self.traffic.lazy(RankPiece(tensor, layout.hidden(shape), shape))
            if not self.traffic.has_rows(tensor, layout):
                return self.traffic.unsampled_to_glue(tensor, layout)
            return self.traffic.lazy(self._piece(tensor, cuts.get(place, ()), tensor is hidden))

        return map_places(output, convert)

    def _piece(self, tensor: Tensor, cuts: ShardSpecs, is_hidden: bool) -> RankPiece:
        layout = self.border.layout
        shape = [self.traffic.rows, *tensor.shape[1:]]
        for cut in cuts:
            shape[cut.dim] = cut.extent
        if self.border.lines and not (is_hidden and layout.sequence > 1):
            return RankPiece(tensor, self.border.split(cuts, shape), tuple(shape))
        if is_hidden and tensor.dim() > INNER:
            shape[INNER] *= layout.sequence
            return RankPiece(tensor, layout.hidden(shape), tuple(shape))
        return RankPiece(tensor, layout.samples(shape), tuple(shape))
