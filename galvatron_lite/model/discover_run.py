"""Layers of a model as seen while it runs: their order, and which of its sub-networks do not depend on each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from galvatron_lite.model.discover_blocks import BlockNames, find_blocks
from galvatron_lite.model.discover_forks import forked_blocks
from galvatron_lite.model.discover_units import unit_paths
from galvatron_lite.model.trace_flow import Flow
from galvatron_lite.model.trace_run import Observation, observe


@dataclass(frozen=True, slots=True)
class Watched:
    """A run of a model on the meta device."""

    blocks: list[str]  # paths of its blocks
    seen: Observation  # the run, the calls of units among it
    output: Any  # what the model gave in the run that ``flow`` is of
    flow: Flow  # what tensors are made of
    forked: bool  # whether blocks are those of sub-networks that do not depend on each other


def watch(twin: nn.Module, batch: Any, blocks: BlockNames | None) -> Watched:
    """Run a model and find its blocks; those that the user names are what they are.

    Args:
        twin: the model on the meta device.
        batch: on the meta device.
        blocks: see ``discover_layers``.

    Raises:
        TraceError: an unknown block, or the model does not run.
    """
    paths, flow = find_blocks(twin, blocks), Flow(twin, batch)
    seen = observe(twin, batch, unit_paths(twin, paths), flow)
    forked = None
    if blocks is None:
        paths = [path for path in paths if path in flow.ran]  # not dicts of modules, which only hold what runs
        forked = forked_blocks(twin, flow, seen.order, paths)
    chosen = paths if forked is None else forked
    as_is = seen if forked is None and not flow.copied else observe(twin, batch, unit_paths(twin, chosen))
    return Watched(chosen, as_is, seen.output, flow, forked is not None)
