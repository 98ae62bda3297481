"""A model as layers: what runs before the repeated blocks, the blocks, what runs after them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from galvatron_lite.errors import TraceError
from galvatron_lite.model.batch import batch_size, call_model, resize_batch
from galvatron_lite.model.blocks import BlockNames, find_blocks, has_parameters, signature, unit_paths
from galvatron_lite.model.forks import forked_blocks
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.trace.figures import SAMPLES
from galvatron_lite.model.trace.flow import DataFlow
from galvatron_lite.model.trace.meta import meta_copy
from galvatron_lite.model.trace.record import ValuesReadError
from galvatron_lite.model.trace.run import Observation, garbage_waits, observe

_RESIZING = ("torch.nn.modules.pooling", "torch.nn.modules.upsampling")
"""Packages of modules without parameters that are layers if they run between two blocks."""


def discover_layers(model: nn.Module, batch: Any = None, blocks: BlockNames | None = None) -> tuple[Layer, ...]:
    """Return the layers of a model in running order: ``before``, one for each block, ``after``.

    A model that ran and falls into independent sub-networks (two towers, heads of a trunk) has the layers of each of
    them, found inside its own modules. Without repeated blocks each child of a Sequential is a block; any other model
    becomes one layer, ``before``, and an empty ``after``. Modules with parameters, and pooling and interpolation, that
    run between two blocks are layers of role BLOCK, too. ``before`` has the parameters outside of all layers' modules,
    and modules that run several times in a forward pass, as a layer is priced for one run.

    Args:
        model: any module; it is not changed, and its storages are not touched.
        batch: example batch, run on a copy of the model without storages to see the running order. If None, modules
            count as running in the order they were registered.
        blocks: path of the container of the blocks, or paths and classes of the blocks; found if None.

    Raises:
        TraceError: an unknown block, or a model that does not run on the batch.
    """
    if batch is None:
        return arrange_layers(model, find_blocks(model, blocks))
    return watch_model(model, batch, blocks).layers


def arrange_layers(
    model: nn.Module,
    blocks: list[str],
    order: list[str] | None = None,
    signatures: Mapping[str, Hashable] | None = None,
    holders: Collection[str] = (),
) -> tuple[Layer, ...]:
    """Make layers from blocks and the order in which modules first run.

    Args:
        blocks: paths of the blocks.
        order: paths of modules in the order they ran; registration order if None.
        signatures: by path, keys that equal layers share; their structure if None.
        holders: paths of modules that never ran, whose parameters other code reads. Before the blocks these are
            parameters of the model itself.
    """
    units, chosen = _in_order(unit_paths(model, blocks, order or ()), order), set(blocks)
    indices = [index for index, path in enumerate(units) if path in chosen]
    first, last = (indices[0], indices[-1]) if indices else (len(units), len(units))
    calls = Counter(order or units)
    middle, again = list[str](), list[str]()
    for path in units[first : last + 1]:
        module = model.get_submodule(path)
        if path in chosen or (calls[path] == 1 and _is_layer(module)):
            middle.append(path)
        elif calls[path] > 1 and _is_layer(module):
            again.append(path)
    keys = [(signatures or {}).get(path) or signature(model.get_submodule(path)) for path in middle]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}  # by first use
    kinds = [f"block{numbers[key]}" if len(numbers) > 1 else "block" for key in keys]
    head = (path for path in units[:first] if path not in holders)
    before = Layer("before", "before", Role.BEFORE, (*head, *again))
    after = Layer("after", "after", Role.AFTER, tuple(units[last + 1 :]))
    layers = [Layer(path, kind, Role.BLOCK, (path,)) for path, kind in zip(middle, kinds, strict=True)]
    return (before, *layers, after)


def _is_layer(module: nn.Module) -> bool:
    """Whether a module between two blocks is a layer."""
    return has_parameters(module) or type(module).__module__ in _RESIZING


def _in_order(units: list[str], order: list[str] | None) -> list[str]:
    """Units in running order; those that never ran follow the unit registered before them."""
    if order is None:
        return units
    ran = [path for path in dict.fromkeys(order) if path in set(units)]
    for index, path in enumerate(units):
        if path not in ran:
            ran.insert(ran.index(units[index - 1]) + 1 if index else 0, path)
    return ran


def _holders(model: nn.Module, flow: DataFlow) -> frozenset[str]:
    """Paths of modules that never ran, and whose parameters other code reads, of no module that ran among them."""
    paths: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return frozenset(
        path
        for name, parameter in model.named_parameters()
        if flow.readers[name] and not flow.ran.intersection(paths[id(parameter)])
        for path in paths[id(parameter)]
        if path
    )


@dataclass(frozen=True, slots=True)
class Watched:
    """A run of a model on the meta device, from which ``capture.trace.trace`` continues."""

    twin: nn.Module  # the copy of the model that ran
    blocks: list[str]  # paths of its blocks
    seen: Observation  # the run, with the calls of units
    output: Any  # of the run that ``flow`` follows
    flow: DataFlow  # the sources of tensors
    forked: bool  # whether blocks are those of independent sub-networks

    @property
    def layers(self) -> tuple[Layer, ...]:
        """See ``discover_layers``."""
        return self.arranged()

    def arranged(self, signatures: Mapping[str, Hashable] | None = None) -> tuple[Layer, ...]:
        """The same with keys of equal layers; see ``arrange_layers``."""
        return arrange_layers(self.twin, self.blocks, self.seen.order, signatures, _holders(self.twin, self.flow))

    def units(self) -> list[str]:
        """See ``unit_paths``."""
        return unit_paths(self.twin, self.blocks, self.seen.order)


@garbage_waits()
def watch_model(model: nn.Module, batch: Any, blocks: BlockNames | None = None) -> Watched:
    """Run a copy of a model without storages on an example batch; arguments and errors as of ``discover_layers``."""
    try:
        return watch(meta_copy(model), resize_batch(batch, SAMPLES[1]), blocks)
    except ValuesReadError:
        raise
    except TraceError as error:
        raise (kept_error(model, batch) or error) from error


def kept_error(model: nn.Module, batch: Any) -> TraceError | None:
    """Of a model that does not run on fewer samples: that it keeps a row for each sample from pass to pass; None where
    it does not."""
    twin, rows = meta_copy(model), batch_size(batch)
    held = list(_held(twin))  # so that no other tensor takes an id
    before = {(path, name): (id(one), one._version) for path, name, one in held}
    with suppress(Exception):  # whatever a user's model does
        call_model(twin, resize_batch(batch, rows))
    names = [
        f"{path}.{name}".lstrip(".")
        for path, name, one in _held(twin)
        if one.shape[:1] == (rows,) and (id(one), one._version) != before.get((path, name))
    ]
    if not names:
        return None
    remedy = (
        "The model keeps it from pass to pass, with a row for each sample, so that it runs on batches of one size. "
        "Make it an entry of the batch."
    )
    return TraceError("model", ", ".join(names), remedy)


def _held(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Buffers, and tensors in plain attributes, by module and name."""
    for path, module in model.named_modules():
        for name, one in {**vars(module), **module._buffers}.items():
            if isinstance(one, Tensor):
                yield path, name, one


def watch(twin: nn.Module, batch: Any, blocks: BlockNames | None) -> Watched:
    """Run a model on the meta device and find its blocks, unless the user names them.

    Raises:
        TraceError: a block that the user names runs several times, the model does not run, or creates parameters.
    """
    paths, flow = find_blocks(twin, blocks), DataFlow(twin, batch)
    units = unit_paths(twin, paths)
    run = observe(twin, batch, units, flow)
    for name, _ in twin.named_parameters():
        if name not in flow.parameters:
            remedy = "Create all parameters before training: in __init__, or run the model once on a batch before."
            raise TraceError("model", f"{name}, a parameter that forward creates", remedy)
    calls, forked = Counter(run.order), None
    again = [path for path in paths if calls[path] > 1]
    if blocks is not None and again:
        remedy = (
            f"It runs {calls[again[0]]} times in a forward pass, a layer once: leave it out, or name what holds it."
        )
        raise TraceError("block", again[0], remedy)
    paths = [path for path in paths if path not in again]
    if blocks is None:
        paths = [path for path in paths if path in flow.ran]  # without dicts of modules, which only hold what runs
        forked = forked_blocks(twin, flow, run.order, paths)
    chosen = paths if forked is None else [path for path in forked if calls[path] == 1]
    running = unit_paths(twin, chosen, run.order)
    # another run if the first one had other units, or tensors that were copied to follow them
    seen = run if running == units and not flow.copied else observe(twin, batch, running)
    return Watched(twin, chosen, seen, run.output, flow, forked is not None)
