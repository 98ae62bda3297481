"""Whether ranks draw random numbers for themselves, or what one process would draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer
from galvatron_lite.parallelism.rng.modules import Draws, find_sites
from galvatron_lite.parallelism.rng.numbers import SampleSlice
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.mesh import Meshes
from galvatron_lite.runtime.placement import LayerAssignment, glue_of

OWN, SAME = "own", "same"


def draws_of(
    randomness: str, model: nn.Module, plan: Plan, layers: Sequence[Layer], batch: Any, seed: int, *, compiles: bool
) -> Draws | None:
    """What decides the draws of a model that is not split yet; None where each rank draws for itself.

    Raises:
        InputError: an unknown word, or the model cannot draw what one process does.
    """
    if randomness not in (OWN, SAME):
        raise InputError("randomness", randomness, f"Give '{OWN}' or '{SAME}'.")
    if randomness == OWN:
        return None
    if compiles or plan.branches:
        what = "blocks are compiled" if compiles else "branches have ranks of their own"
        raise InputError("randomness", randomness, f"Take '{OWN}': {what}.")
    return Draws(seed, find_sites(model, layers, batch), batch)


def lot_of(placed: LayerAssignment, meshes: Meshes) -> SampleSlice:
    """What this rank has of a layer's work."""
    groups, strategy = meshes.groups(placed.strategy), placed.strategy
    replicas = meshes.stage_devices // strategy.batch_degree
    line = groups.tensor if strategy.tensor > 1 else groups.slices
    inner = (1, 0) if line is None else (dist.get_world_size(line), dist.get_rank(line))
    return SampleSlice(strategy.batch_degree, meshes.index_in_stage // replicas, inner)


@contextmanager
def drawing(
    draws: Draws | None, stage: Sequence[LayerAssignment], meshes: Meshes, part: object, rows: int
) -> Iterator[None]:
    """The model's forward runs inside, on a micro-batch of so many samples."""
    if draws is None:
        yield
        return
    draws.begin(part, rows)
    with draws.inside(lot_of(glue_of(stage), meshes)):
        yield
