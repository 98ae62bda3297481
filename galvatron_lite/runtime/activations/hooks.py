"""Hooks on a stage's layers that bring what they are given into their layout and precision.

What a layer returns keeps its layout until another layer takes it, or code between layers looks at it (``laid``); so it
moves once, to where it is wanted, and skip connections between layers of unlike layouts need no rules of their own.
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
"""By path of a module, the forward pre-hooks and the forward hooks that its user registered."""


def hooks_of(model: nn.Module) -> UserHooks:
    """The hooks of all modules; torch has no public way to ask, the two dicts are as old as hooks are."""
    return {path: (tuple(one._forward_pre_hooks), tuple(one._forward_hooks)) for path, one in model.named_modules()}


def install_hooks(
    model: nn.Module,
    stage: Sequence[LayerAssignment],
    borders: Mapping[str, BoundaryLayout],
    traffic: ActivationRedistributor,
    incoming: Collection[ActivationLayout],
    users: UserHooks = MappingProxyType({}),
) -> None:
    """Put the hooks on a stage's layers, where layouts or precision ask for any; ``borders`` are by path of a module.

    Call it after every other hook of the layers is in place: conversion comes before ZeRO wraps the inputs. The user's
    hooks see what code between layers sees: they run before inputs are converted, and after outputs are.
    """
    layouts = {*incoming, *(border.layout for border in borders.values())}
    moves = layouts != {traffic.glue} or bool(traffic.border.lines)
    for layer, path in [(placed.layer, path) for placed in stage for path in placed.layer.modules]:
        casts, border = traffic.compute is not None and layer.role is Role.BLOCK, borders[path]
        module = model.get_submodule(path)
        if type(module).forward is nn.Module.forward:  # a ParameterList, say
            for parameter in module.parameters():
                traffic.read(parameter, border.layout)
        if moves or casts:
            entry = _Entry(traffic, border, layer.name, traffic.compute if casts else None, moves)
            module.register_forward_pre_hook(entry, prepend=True, with_kwargs=True)
        if border.layout != traffic.glue or border.lines:
            module.register_forward_hook(_Exit(traffic, border))
        before, after = users.get(path, ((), ()))
        # torch has no other way to order hooks that are registered
        for key in reversed(before):
            module._forward_pre_hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]
        for key in after:
            module._forward_hooks.move_to_end(key)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Entry:
    """Pre-hook: the first floating-point tensor is the hidden state; pixels of all pictures like it are shared.

    Of tokens that ranks share, each takes its own of the hidden state, or else of ids. All other arguments stay full.
    """

    traffic: ActivationRedistributor
    border: BoundaryLayout
    layer: str
    compute: torch.dtype | None
    moves: bool  # whether layouts differ; else lists and dicts, which the layer may write to, stay as they are

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = next((tensor for tensor in tensors_of((args, kwargs)) if tensor.is_floating_point()), None)
        sampled = self.traffic.sampled.get(self.layer, {})
        cuts: dict[str, ShardSpecs] = {}

        def convert(place: str, tensor: Tensor) -> Tensor:
            piece = self.traffic.piece(tensor, sampled.get(place))
            if piece is None:
                return self._once(tensor, self.border.layout, lambda: self._summed(self._loose(tensor)))
            target = self._target(piece.shape, tensor, hidden)
            if cut := self.border.cuts(target, piece.shape):
                cuts[place] = cut

            def moved() -> Tensor:
                return self.traffic.mover(self._cast(piece.tensor), piece.split, target, piece.shape)

            return moved() if tensor is hidden else self._once(tensor, target, lambda: self._summed(moved()))

        if self.moves:
            args, kwargs = map_places((args, kwargs), convert)
        else:
            args = tuple(_mapped(item, convert, f".0.{place}") for place, item in enumerate(args))
            kwargs = {name: _mapped(item, convert, f".1.{name}") for name, item in kwargs.items()}
        return args, {**kwargs, SPECS: SpecsAt(cuts)} if self.border.lines else kwargs

    def _target(self, shape: tuple[int, ...], tensor: Tensor, hidden: Tensor | None) -> AxisSplit:
        layout = self.border.layout
        if hidden is None and layout.tokens > 1 and len(shape) == IDS:
            return AxisSplit(layout.devices, (*layout.samples(shape).axes[:INNER], layout.token_axis))
        alike = layout.splits_pixels and hidden is not None and len(shape) == hidden.dim()
        if self.border.channels is not None:
            alike = is_shared(tensor)
        return layout.hidden(shape) if tensor is hidden or alike else layout.samples(shape)

    def _loose(self, tensor: Tensor) -> Tensor:
        full, line = self._cast(self.traffic.loose(tensor, self.border.layout)), self.border.channels
        if line is None or not is_shared(full):
            return full
        cut = ShardSpec(INNER, full.shape[INNER], line)
        return enter(full, [line]).narrow(INNER, cut.start, cut.length)

    def _summed(self, tensor: Tensor) -> Tensor:
        """What ranks use with their shares of the tokens: its gradient is the sum of theirs."""
        group = self.border.matmuls
        return tensor if group is None or not tensor.requires_grad else copy_to_group(tensor, group)

    def _once(self, tensor: Tensor, key: object, convert: Callable[[], Tensor]) -> Tensor:
        """What several layers may take of the glue code (a mask, positions) is converted once a micro-batch."""
        if isinstance(tensor, LayoutTensor):
            return convert()
        brought, place = self.traffic.brought, (id(tensor), (key, self.border.matmuls))
        if place not in brought:
            # the original is kept too, so that no other tensor gets its identity
            with torch.enable_grad():
                brought[place] = (tensor, convert())
        return brought[place][1]

    def _cast(self, tensor: Tensor) -> Tensor:
        compute = self.compute
        return tensor if compute is None or not tensor.is_floating_point() else tensor.to(compute)


def _mapped(item: Any, convert: Callable[[str, Tensor], Tensor], place: str) -> Any:
    return item if isinstance(item, (list, dict)) else map_places(item, convert, place)


@dataclass(frozen=True, slots=True)
class _Exit:
    """Hook: a layer's output, for the code behind it."""

    traffic: ActivationRedistributor
    border: BoundaryLayout

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        cuts: Mapping[str, ShardSpecs] = {}
        if self.border.lines:
            output, announced = output
            cuts = announced.places
        hidden, layout = next(tensors_of(output), None), self.border.layout
        extents = iter(self.border.outputs)

        def convert(place: str, tensor: Tensor) -> Tensor:
            if self.border.channels is not None and is_shared(tensor):
                channels = next(extents, None) or tensor.shape[INNER] * layout.channels
                shape = (self.traffic.rows, channels, *tensor.shape[INNER + 1 :])
                return self.traffic.hand(RankPiece(tensor, layout.hidden(shape), shape))
            if not self.traffic.has_rows(tensor, layout):
                return self.traffic.see(tensor, layout)
            return self.traffic.hand(self._piece(tensor, cuts.get(place, ()), tensor is hidden))

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
