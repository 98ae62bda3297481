"""A model as layers: what runs before the repeated blocks, the blocks, what runs after them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from galvatron_lite.model.batch import resize_batch
from galvatron_lite.model.discover_blocks import BlockNames, find_blocks, kind_names, signature, unit_paths
from galvatron_lite.model.discover_forks import forked_blocks
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.trace_figures import SAMPLES
from galvatron_lite.model.trace_flow import DataFlow
from galvatron_lite.model.trace_meta import meta_copy
from galvatron_lite.model.trace_run import Observation, observe


def discover_layers(model: nn.Module, batch: Any = None, blocks: BlockNames | None = None) -> tuple[Layer, ...]:
    """The layers of a model in running order: ``before``, one for each block, ``after``.

    Args:
        model: any module; it is not changed, and its storages are not touched.
        batch: example batch; the running order is then seen on a copy of the model without storages. Without it the
            order in which modules were registered is taken.
        blocks: path of the container of the blocks, or paths and classes of the blocks; found by itself if None.

    A model seen to run that falls into sub-networks which do not depend on each other (two towers, heads of a trunk)
    has the layers of each of them, found inside its own modules, and no modules of theirs before or after the blocks.
    Without repeated blocks every child of a Sequential is a block; any other model becomes one layer, ``before``, and
    an empty ``after``. Modules with parameters, and pooling and interpolation,
    that run between two blocks are layers of role BLOCK, too. Parameters
    that no layer's modules hold belong to ``before``.

    Raises:
        TraceError: an unknown block, or a model that does not run on the batch.
    """
    if batch is None:
        return arrange_layers(model, find_blocks(model, blocks))
    watched = watch(meta_copy(model), resize_batch(batch, SAMPLES[1]), blocks)
    return arrange_layers(model, watched.blocks, watched.seen.order)


def arrange_layers(
    model: nn.Module,
    blocks: list[str],
    order: list[str] | None = None,
    signatures: Mapping[str, Hashable] | None = None,
) -> tuple[Layer, ...]:
    """Layers from blocks and the order in which modules first run.

    Args:
        model: the model.
        blocks: paths of the blocks.
        order: paths of modules in the order they first ran; None for registration order.
        signatures: key of equal layers by path; structure alone if not given.
    """
    units = unit_paths(model, blocks)
    ran = _first_runs(units, order)
    places = [place for place, path in enumerate(ran) if path in set(blocks)]
    first, last = (places[0], places[-1]) if places else (len(ran), len(ran))
    once = {path for path, calls in Counter(order or ()).items() if calls == 1}
    seen = set(order or ran)
    middle = [
        path
        for path in ran[first : last + 1]
        if path in set(blocks)
        or (path in seen and any(True for _ in model.get_submodule(path).parameters()))
        or (path in once and (type(model.get_submodule(path)).__module__ in _RESIZING))
    ]
    keys = [(signatures or {}).get(path) or signature(model.get_submodule(path)) for path in middle]
    kinds = kind_names(keys)
    before = Layer("before", "before", Role.BEFORE, tuple(ran[:first]))
    after = Layer("after", "after", Role.AFTER, tuple(ran[last + 1 :]))
    inner = [Layer(path, kind, Role.BLOCK, (path,)) for path, kind in zip(middle, kinds, strict=True)]
    return (before, *inner, after)


def _first_runs(units: list[str], order: list[str] | None) -> list[str]:
    """Units in running order; those that never ran follow the unit registered before them."""
    if order is None:
        return units
    known = set(units)
    ran = [path for path in dict.fromkeys(order) if path in known]
    for place, path in enumerate(units):
        if path not in ran:
            ran.insert(ran.index(units[place - 1]) + 1 if place else 0, path)
    return ran


_RESIZING = ("torch.nn.modules.pooling", "torch.nn.modules.upsampling")


@dataclass(frozen=True, slots=True)
class Watched:
    """A run of a model on the meta device."""

    blocks: list[str]  # paths of its blocks
    seen: Observation  # the run, the calls of units among it
    output: Any  # what the model gave in the run that ``flow`` is of
    flow: DataFlow  # what tensors are made of
    forked: bool  # whether blocks are those of sub-networks that do not depend on each other


def watch(twin: nn.Module, batch: Any, blocks: BlockNames | None) -> Watched:
    """Run a model and find its blocks; those that the user names are what they are."""
    paths, flow = find_blocks(twin, blocks), DataFlow(twin, batch)
    seen = observe(twin, batch, unit_paths(twin, paths), flow)
    forked = None
    if blocks is None:
        paths = [path for path in paths if path in flow.ran]  # not dicts of modules, which only hold what runs
        forked = forked_blocks(twin, flow, seen.order, paths)
    chosen = paths if forked is None else forked
    as_is = seen if forked is None and not flow.copied else observe(twin, batch, unit_paths(twin, chosen))
    return Watched(chosen, as_is, seen.output, flow, forked is not None)
