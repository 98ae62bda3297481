"""Hooks on a stage's blocks that bring what they are given into their layout and precision.

What a block returned goes to the next block as it is, if both lie alike. Everything else a block is given (masks,
positions) comes from the glue code, in the glue layout. Blocks of one container form a chain; what leaves a chain
returns to the glue layout, since other code looks at it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.model.graph import Role
from galvatron_lite.runtime.block_calls import map_places
from galvatron_lite.runtime.layout import Layout
from galvatron_lite.runtime.placement import Placed
from galvatron_lite.runtime.redistribute import Mover


@dataclass(slots=True)
class Traffic:
    """What the hooks of one stage share.

    Attributes:
        mover: changes layouts.
        glue: the stage's glue layout.
        compute: what floating-point inputs of blocks are cast to; None: left alone.
        sampled: by block and place, whether an argument has the samples along dim 0; where nothing is known, one
            whose dim 0 has as many items as there are samples is taken to.
        rows: of the micro-batch, over the whole stage.
        returned: tensors that the last block returned, by identity, with their layout.
        brought: glue tensors that were converted for a layout in this micro-batch, by identity.
    """

    mover: Mover
    glue: Layout
    compute: torch.dtype | None
    sampled: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    rows: int = 0
    returned: dict[int, tuple[Tensor, Layout]] = field(default_factory=dict)
    brought: dict[tuple[int, Layout], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def begin(self, rows: int) -> None:
        """A micro-batch of so many rows, over the whole stage, starts its forward pass."""
        self.rows = rows
        self.end()

    def end(self) -> None:
        """Let go of the micro-batch's tensors."""
        self.returned.clear()
        self.brought.clear()

    def cast(self, tensor: Tensor) -> Tensor:
        """In the precision of compute."""
        return tensor if self.compute is None or not tensor.is_floating_point() else tensor.to(self.compute)

    def bring(self, tensor: Tensor, target: Layout, sampled: bool | None) -> Tensor:
        """A tensor of the glue code in a block's layout (its tokens stay whole), once a micro-batch.

        Args:
            tensor: as the glue code gives it.
            target: the block's layout.
            sampled: whether it has the samples along dim 0; None: not known.
        """
        key = (id(tensor), target)
        if key not in self.brought:
            moved = self.cast(tensor)
            fits = tensor.dim() > 0 and tensor.shape[0] * self.glue.batch == self.rows
            if fits and sampled is not False and self.glue.batch != target.batch:
                moved = self.mover(moved, self.glue, target.whole_tokens, self.rows)
            # the original is kept too, so that no other tensor gets its identity
            self.brought[key] = (tensor, moved)
        return self.brought[key][1]


@dataclass(frozen=True, slots=True)
class Step:
    """One block of a chain: where its hidden state comes from and how it wants it."""

    placed: Placed
    source: Layout

    @property
    def target(self) -> Layout:
        """The layout the block works in."""
        return self.placed.layout


def install_hooks(
    model: nn.Module, stage: Sequence[Placed], traffic: Traffic, incoming: Layout | None, last_stage: bool
) -> None:
    """Put the hooks on a stage's layers, where layouts or precision ask for any.

    Call it after every other hook of the layers is in place: conversion comes before ZeRO wraps the inputs.

    Args:
        model: holds the layers.
        stage: the stage's layers.
        traffic: shared by the hooks.
        incoming: layout in which the previous stage sends; None for the first stage.
        last_stage: whether no stage follows; what another stage is sent stays in its last block's layout.
    """
    chains = _chains(stage, traffic.glue, incoming)
    for number, chain in enumerate(chains):
        returns = last_stage or number + 1 < len(chains)
        for position, step in enumerate(chain):
            module = model.get_submodule(step.placed.layer.modules[0])
            following = chain[position + 1] if position + 1 < len(chain) else None
            if _converts(step, traffic):
                module.register_forward_pre_hook(_Entry(traffic, step), prepend=True, with_kwargs=True)
            if following is not None and _converts(following, traffic):
                module.register_forward_hook(_Keep(traffic, step.target))
            if following is None and returns and step.target != traffic.glue:
                module.register_forward_hook(_Leave(traffic, step.target))


def _chains(stage: Sequence[Placed], glue: Layout, incoming: Layout | None) -> list[list[Step]]:
    """Consecutive blocks of one container; a stage without blocks takes what it is sent at its first module."""
    blocks = [placed for placed in stage if placed.layer.role is Role.BLOCK]
    if not blocks and incoming is not None and stage[0].layer.modules:
        return [[Step(stage[0], incoming)]]
    chains: list[list[Step]] = []
    source = incoming or glue
    for _, group in groupby(blocks, key=lambda placed: placed.layer.modules[0].rpartition(".")[0]):
        chain: list[Step] = []
        for placed in group:
            chain.append(Step(placed, source))
            source = placed.layout
        chains.append(chain)
        source = glue
    return chains


def _converts(step: Step, traffic: Traffic) -> bool:
    moves = step.source != step.target or step.target.batch != traffic.glue.batch
    return moves or traffic.compute is not None


@dataclass(frozen=True, slots=True)
class _Entry:
    """Pre-hook: the first floating-point tensor is the hidden state; the rest is known by identity, or is glue's."""

    traffic: Traffic
    step: Step

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = next((tensor for tensor in tensors_of((args, kwargs)) if tensor.is_floating_point()), None)

        sampled = self.traffic.sampled.get(self.step.placed.layer.name, {})

        def convert(place: str, tensor: Tensor) -> Tensor:
            traffic, target = self.traffic, self.step.target
            if tensor is hidden:
                return traffic.mover(traffic.cast(tensor), self.step.source, target, traffic.rows)
            known = traffic.returned.get(id(tensor))
            if known is None:
                return traffic.bring(tensor, target, sampled.get(place))
            return traffic.mover(traffic.cast(tensor), known[1], target.whole_tokens, traffic.rows)

        converted = map_places((args, kwargs), convert)
        self.traffic.returned.clear()
        return converted


@dataclass(frozen=True, slots=True)
class _Keep:
    """Hook: remembers what the block returned beside its hidden state, for the next block."""

    traffic: Traffic
    layout: Layout

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        for tensor in list(tensors_of(output))[1:]:
            if tensor.dim() > 0 and tensor.shape[0] * self.layout.batch == self.traffic.rows:
                self.traffic.returned[id(tensor)] = (tensor, self.layout.whole_tokens)


@dataclass(frozen=True, slots=True)
class _Leave:
    """Hook of a chain's last block: what it returns goes back to the glue layout."""

    traffic: Traffic
    layout: Layout

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        traffic, hidden = self.traffic, next(tensors_of(output), None)

        def convert(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0 or tensor.shape[0] * self.layout.batch != traffic.rows:
                return tensor
            source = self.layout if tensor is hidden else self.layout.whole_tokens
            return traffic.mover(tensor, source, traffic.glue, traffic.rows)

        return map_tensors(output, convert)
