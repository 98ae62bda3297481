"""A model as layers: what runs before the repeated blocks, the blocks, what runs after them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from itertools import count, groupby, pairwise, takewhile
from operator import or_
from typing import Any

import networkx
from torch import Tensor, nn

from galvatron_lite.errors import TraceError
from galvatron_lite.model.batch import batch_size, call_model, resize_batch
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.order import bits, order_of
from galvatron_lite.model.trace.figures import SAMPLES
from galvatron_lite.model.trace.flow import DataFlow, Needs, at, holders_of, inside, needs_of
from galvatron_lite.model.trace.meta import meta_copy
from galvatron_lite.model.trace.record import ValuesReadError
from galvatron_lite.model.trace.run import Observation, garbage_waits, observe

BlockNames = str | type[nn.Module] | Sequence[str | type[nn.Module]]
"""How a user names blocks: the path of a container or module, a module class, or a list of these."""

_LEAST_SHARE = 0.1
_MOST = 0.75
_FEWEST_PARTS = 3

NEVER_RUN = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that only hold others."""
_INDEX_WORDS = ("idx", "index", "layer_id", "layer_number")
_SETTING_TYPES = (int, float, str, bytes, type(None))


def find_blocks(model: nn.Module, blocks: BlockNames | None = None) -> list[str]:
    """Paths of the repeated blocks in registration order.

    Unless the user names them they are runs of two or more neighbouring children of one class in a ModuleList or
    Sequential, the outermost such; of a class of torch.nn only where at least two of the children are structurally
    equal or nearly so. Runs with less than a tenth of the model's parameters do not count. Other modules of such a
    run's class that stand in a ModuleList or Sequential are blocks, too (residual networks change width inside a run).
    A model without any is cut into its parts: three or more of its children that are made of several modules (levels
    of a U-Net, Sequentials one after the other), or those of the child that has most of its modules with weights. A
    model without such parts (a plain chain of convolutions, pooling and activations) has as blocks the children of one
    Sequential, the one that has most children with parameters; without a Sequential it has no block.
    """
    if blocks is None:
        return _repeated_blocks(model) or _parts(model) or _sequential_children(model)
    names = [blocks] if isinstance(blocks, (str, type)) else blocks
    paths = {path for name in names for path in _named(model, name)}
    return [path for path, _ in model.named_modules(remove_duplicate=False) if path in paths]


def _named(model: nn.Module, name: str | type[nn.Module]) -> list[str]:
    modules = dict(model.named_modules())
    if isinstance(name, type):
        paths = _outermost([path for path, module in modules.items() if isinstance(module, name)])
    elif name not in modules:
        paths = []
    elif isinstance(modules[name], (nn.ModuleList, nn.Sequential)):
        paths = [_join(name, child) for child, _ in modules[name].named_children()]
    else:
        paths = [name]
    if not paths or paths == [""]:
        remedy = "Give the path of a ModuleList, Sequential or module (see model.named_modules()), or a module class."
        raise TraceError("blocks", name if isinstance(name, str) else name.__name__, remedy)
    return paths


def _outermost(paths: list[str]) -> list[str]:
    return [path for path in paths if not any(inside(path, other) for other in paths)]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _repeated_blocks(model: nn.Module) -> list[str]:
    modules = dict(model.named_modules())
    sizes = {path: sum(p.numel() for p in module.parameters()) for path, module in modules.items()}
    # a module that two others hold counts where it is met first
    runs = [run for run in _runs(model, "") if modules.keys() >= set(run)]
    large = [run for run in runs if sum(map(sizes.__getitem__, run)) >= _LEAST_SHARE * sizes[""] and sizes[""]]
    user_classes = {type(module) for module in modules.values() if not type(module).__module__.startswith("torch.nn.")}
    classes = {
        type(modules[run[0]])
        for run in large
        if type(modules[run[0]]) in user_classes or _some_alike([modules[path] for path in run])
    }
    chosen = {path for run in runs if type(modules[run[0]]) in classes for path in run}
    chosen |= {
        path
        for path, module in modules.items()
        if type(module) in classes & user_classes
        and isinstance(modules[path.rpartition(".")[0]], (nn.ModuleList, nn.Sequential))
    }
    return _outermost([path for path in modules if path in chosen])


def _runs(module: nn.Module, path: str) -> list[list[str]]:
    """Runs of neighbouring children of one class, in the outermost containers that have one."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        grouped = [list(group) for _, group in groupby(module.named_children(), key=lambda item: type(item[1]))]
        # two or more with parameters, no bare namespaces; some alike, or at least none a container of such
        runs = [
            [_join(path, name) for name, _ in run]
            for run in grouped
            for parts in [[child for _, child in run]]
            if len(parts) > 1 and _is_weighty(parts[0]) and type(parts[0]) is not nn.Module
            if _some_alike(parts) or not any(_runs(part, "") for part in parts)
        ]
        if runs:
            return runs
    return [run for name, child in module.named_children() for run in _runs(child, _join(path, name))]


def _some_alike(children: list[nn.Module]) -> bool:
    """Whether two are structurally equal, or neighbours have more than half of their parameters' shapes in common."""
    if max(Counter(signature(child) for child in children).values()) > 1:
        return True
    shapes = [{(name, p.shape) for name, p in child.named_parameters()} for child in children]
    return any(2 * len(one & other) > len(one | other) for one, other in pairwise(shapes))


def _parts(model: nn.Module, path: str = "") -> list[str]:
    """Children that are made of several modules, of the model or of what nearly all of it lies in; [] if too few."""
    if isinstance(model, nn.Sequential):
        return []
    weights = {  # modules inside that have parameters of their own
        name: sum(_is_weighty(part, recurse=False) for part in child.modules())
        for name, child in model.named_children()
    }
    for name, leaves in weights.items():
        if leaves > _MOST * sum(weights.values()):
            return _parts(model.get_submodule(name), _join(path, name))
    parts = [
        _join(path, name)
        for name, child in model.named_children()
        if not isinstance(child, NEVER_RUN) and any(map(_is_weighty, child.children()))
    ]
    return parts if len(parts) >= _FEWEST_PARTS else []


def _sequential_children(model: nn.Module) -> list[str]:
    """Children of the outermost Sequential that has most children with parameters, of equals the first."""
    rows = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Sequential)]
    chains = [(path, module) for path, module in rows if not any(inside(path, other) for other, _ in rows)]
    if not chains:
        return []
    path, chain = max(chains, key=lambda row: sum(_is_weighty(child) for child in row[1]))
    return [_join(path, name) for name, _ in chain.named_children()]


def _is_weighty(module: nn.Module, recurse: bool = True) -> bool:
    """Whether a module has parameters."""
    return any(True for _ in module.parameters(recurse))


def signature(module: nn.Module) -> Hashable:
    """A key that is equal for modules of the same class, parameter and buffer shapes, and settings, all the way down.

    Settings are the plain numbers and strings (and tuples of them) that the modules hold as attributes, but for those
    that only say which place a layer has (``layer_idx``). Whether the modules train or not is no part of it.
    """
    parts = []
    for path, part in module.named_modules(remove_duplicate=False):
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        shapes = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)
        settings = sorted((name, repr(value)) for name, value in vars(part).items() if _is_setting(name, value))
        parts.append((path, type(part), shapes, tuple(settings)))
    return tuple(parts)


def _is_setting(name: str, value: Any) -> bool:
    items = value if isinstance(value, (tuple, list)) else (value,)
    places = name == "training" or any(word in name for word in _INDEX_WORDS)
    return not name.startswith("_") and not places and all(isinstance(item, _SETTING_TYPES) for item in items)


def unit_paths(model: nn.Module, blocks: list[str], order: Sequence[str] = ()) -> list[str]:
    """The blocks, and the outermost modules that hold none and can run, in registration order; shared modules once.

    A module without a forward, or one that never ran in ``order`` while others inside it did, only holds these. One
    that never ran and whose modules with parameters lie in others too is another name of what these hold.
    """
    chosen, ran = set(blocks), set(order)

    def holds(module: nn.Module, path: str) -> bool:
        if type(module).forward is nn.Module.forward and any(True for _ in module.children()):
            return True
        return path not in ran and any(inside(one, path) for one in ran)

    def walk(module: nn.Module, path: str) -> list[str]:
        if path in chosen:
            return [path]
        if path and not holds(module, path) and not any(inside(block, path) for block in blocks):
            return [path]
        return [unit for name, child in module.named_children() for unit in walk(child, f"{path}.{name}".lstrip("."))]

    first: dict[int, str] = {}
    for path in walk(model, ""):
        first.setdefault(id(model.get_submodule(path)), path)
    owners = {  # modules that hold parameters themselves
        path: {id(one) for one in model.get_submodule(path).modules() if _is_weighty(one, recurse=False)}
        for path in first.values()
    }
    used = {path for path in owners if path in ran or path in chosen}
    held = {owner for path in used for owner in owners[path]}
    return [path for path, inner in owners.items() if path in used or not inner or not inner <= held]


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
    that no layer's modules hold belong to ``before``. What runs several times in a forward pass is part of ``before``:
    a layer runs once, and so it is priced.

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
) -> tuple[Layer, ...]:
    """Layers from blocks and the order in which modules first run.

    Args:
        blocks: paths of the blocks.
        order: paths of modules in the order they first ran; None for registration order.
        signatures: key of equal layers by path; structure alone if not given.
    """
    units = unit_paths(model, blocks, order or ())
    ran = _first_runs(units, order)
    places = [place for place, path in enumerate(ran) if path in set(blocks)]
    first, last = (places[0], places[-1]) if places else (len(ran), len(ran))
    calls = Counter(order or ran)
    inner, chosen = ran[first : last + 1], set(blocks)
    modules = {path: model.get_submodule(path) for path in inner if path not in chosen}
    between = {path for path, one in modules.items() if _is_weighty(one) or type(one).__module__ in _RESIZING}
    again = [path for path in inner if path in between and calls[path] > 1]
    middle = [path for path in inner if path in chosen or (path in between and calls[path] == 1)]
    keys = [(signatures or {}).get(path) or signature(model.get_submodule(path)) for path in middle]
    numbers = {key: place for place, key in enumerate(dict.fromkeys(keys))}  # by first use
    kinds = [f"block{numbers[key]}" if len(numbers) > 1 else "block" for key in keys]
    before = Layer("before", "before", Role.BEFORE, (*ran[:first], *again))
    after = Layer("after", "after", Role.AFTER, tuple(ran[last + 1 :]))
    layers = [Layer(path, kind, Role.BLOCK, (path,)) for path, kind in zip(middle, kinds, strict=True)]
    return (before, *layers, after)


def _first_runs(units: list[str], order: list[str] | None) -> list[str]:
    """Units in running order; those that never ran follow the unit registered before them."""
    if order is None:
        return units
    pending = set(units)
    ran = [path for path in dict.fromkeys(order) if path in pending]
    for place, path in enumerate(units):
        if path not in ran:
            ran.insert(ran.index(units[place - 1]) + 1 if place else 0, path)
    return ran


_RESIZING = ("torch.nn.modules.pooling", "torch.nn.modules.upsampling")
"""Homes of modules without parameters that are layers of their own between two blocks."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A run of a model on the meta device; its layers serve discovery, and ``capture.trace.trace`` goes on from it."""

    twin: nn.Module  # the copy of the model that ran
    blocks: list[str]  # paths of its blocks
    seen: Observation  # the run, the calls of units among it
    output: Any  # what the model gave in the run that ``flow`` is of
    flow: DataFlow  # what tensors are made of
    forked: bool  # whether blocks are those of sub-networks that do not depend on each other

    @property
    def layers(self) -> tuple[Layer, ...]:
        """See ``discover_layers``."""
        return arrange_layers(self.twin, self.blocks, self.seen.order)


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
    """Run a model and find its blocks; those that the user names are what they are."""
    paths, flow = find_blocks(twin, blocks), DataFlow(twin, batch)
    units = unit_paths(twin, paths)
    seen = observe(twin, batch, units, flow)
    forked = None
    calls = Counter(seen.order)
    again = [path for path in paths if calls[path] > 1]
    if blocks is not None and again:
        remedy = (
            f"It runs {calls[again[0]]} times in a forward pass, a layer once: leave it out, or name what holds it."
        )
        raise TraceError("block", again[0], remedy)
    paths = [path for path in paths if path not in again]
    if blocks is None:
        paths = [path for path in paths if path in flow.ran]  # not dicts of modules, which only hold what runs
        forked = forked_blocks(twin, flow, seen.order, paths)
    chosen = paths if forked is None else [path for path in forked if calls[path] == 1]
    running = unit_paths(twin, chosen, seen.order)
    as_is = seen if running == units and not flow.copied else observe(twin, batch, running)
    return Watched(twin, chosen, as_is, seen.output, flow, forked is not None)


_SHARE = 0.02
"""Of the model's work that all parts of a region but the largest must do: they are the most that a fork could save."""
_NEARLY_ALL = 0.75  # of the model's work: a module that does as much stands for the model


def forked_blocks(model: nn.Module, flow: DataFlow, order: Sequence[str], blocks: list[str]) -> list[str] | None:
    """Blocks such that no layer mixes modules that do not depend on each other; None where the model does not fork."""
    forks = _Forks(model, flow, Counter(order), dict(zip(dict.fromkeys(order), count(), strict=False)))
    inner_blocks = forks.blocks_of("", blocks)
    chosen = set(inner_blocks or ())
    return None if inner_blocks is None else [path for path, _ in model.named_modules() if path in chosen]


@dataclass(frozen=True, slots=True)
class _Forks:
    """A model that ran."""

    model: nn.Module
    flow: DataFlow  # of the run
    calls: Counter[str]  # by module path how often it ran
    places: dict[str, int]  # by module path its place in the order of first runs

    def blocks_of(self, path: str, blocks: list[str]) -> list[str] | None:
        """Blocks inside a module whose blocks (full paths) are those given otherwise; None where it does not fork."""
        units = self._units(path, blocks)
        needs = needs_of(self.flow, self.model, {unit: [unit] for unit in units})
        regions = [region for region in self._regions(needs) if self._counts(path, region, needs)]
        closed = self._closed(path, regions)
        if closed:
            kept = [*(block for block in blocks if not any(at(block, one) for one in closed)), *closed]
            return self.blocks_of(path, kept) or kept
        parts = [part for region in regions for part in region]
        if not parts:
            return self._opened(units, blocks, needs)
        inner_blocks = [inner for part in parts for inner in self._part(part, units)]
        trunk = [unit for unit in units if not any(unit in part for part in parts)]
        kept = [block for block in blocks if block in trunk]
        heavy = (unit for unit in trunk if needs[unit].work > _SHARE * self.work)
        rest = self._opened(trunk, kept, needs) or kept or [block for unit in heavy for block in self._blocks(unit)]
        return [*inner_blocks, *rest]

    def _closed(self, path: str, regions: Sequence[Sequence[Sequence[str]]]) -> list[str]:
        """Modules that hold all parts of a region and are of a class that there are several of: blocks as they are."""
        units = ([unit.split(".") for part in region for unit in part] for region in regions)
        steps = (takewhile(lambda names: len(set(names)) == 1, zip(*region, strict=False)) for region in units)
        around = {".".join(names[0] for names in common) for common in steps}
        return [one for one in around if inside(one, path) and one in self.flow.ran and not self._alone(one)]

    def _alone(self, path: str) -> bool:
        """Whether a module is the only one of its class, or a plain row of others."""
        kind = type(self._module(path))
        return kind is nn.Sequential or sum(type(module) is kind for module in self.model.modules()) == 1

    def _units(self, path: str, blocks: Sequence[str]) -> list[str]:
        module, below = self._module(path), f"{path}." if path else ""
        local = [block.removeprefix(below) for block in blocks if inside(block, path)]
        order = [one.removeprefix(below) for one in self.flow.ran if inside(one, path)]
        return [f"{below}{unit}" for unit in unit_paths(module, local, order)]

    def _blocks(self, path: str) -> list[str]:
        """Blocks inside a module by itself, full paths."""
        paths = (f"{path}.{block}" for block in find_blocks(self._module(path)))
        return [block for block in paths if block in self.flow.ran]

    def _regions(self, needs: dict[str, Needs]) -> list[list[list[str]]]:
        """Where units fall into parts that do not depend on each other: region by region, the units of each part."""
        place = self.places.__getitem__
        ran = sorted((unit for unit, need in needs.items() if need.ran and self._is_unit(unit)), key=place)
        graph: networkx.DiGraph[str] = networkx.DiGraph()
        graph.add_nodes_from(ran)
        graph.add_edges_from((earlier, unit) for unit in ran for earlier in needs[unit].earlier.intersection(ran))
        rounds = {min(group, key=place): group for group in networkx.strongly_connected_components(graph)}
        home = {unit: first for first, group in rounds.items() for unit in group}
        condensed: networkx.DiGraph[str] = networkx.DiGraph()  # units that run again behind each other count as one
        condensed.add_nodes_from(home.values())
        condensed.add_edges_from((home[one], home[other]) for one, other in graph.edges if home[one] != home[other])
        order = order_of(condensed)
        taken = {unit: 1 << order.names.index(first) for unit, first in home.items()}
        ties = self._ties(taken, 1 << len(order.names))
        return [
            [sorted((unit for bit in bits(part) for unit in rounds[order.names[bit]]), key=place) for part in region]
            for region in order.regions((1 << len(order.names)) - 1, ties)
        ]

    def _is_unit(self, unit: str) -> bool:
        # modules without state that run here and there are code of others
        module = self._module(unit)
        return self.calls[unit] == 1 or any(True for _ in (*module.parameters(), *module.buffers()))

    def _ties(self, bit: dict[str, int], outside: int) -> list[int]:
        """Bits of units that must not be apart: they share a parameter, or code around some reads one of another's.

        Where that code is around all units, or around none, ``outside`` is tied to what it reads.
        """
        holders = holders_of(self.model, {unit: [unit] for unit in bit})
        ties = [reduce(or_, (bit[unit] for unit in units)) for units in holders.values() if len(units) > 1]
        for name, units in holders.items():
            held = reduce(or_, (bit[unit] for unit in units))
            for path in self.flow.readers[name]:
                if not any(at(path, unit) for unit in units):
                    near = [bit[unit] for unit in bit if at(unit, path) or at(path, unit)]
                    ties.append(held | (outside if len(near) in (0, len(bit)) else reduce(or_, near)))
        return ties

    def _counts(self, path: str, region: Sequence[Sequence[str]], needs: dict[str, Needs]) -> bool:
        """Whether a region is worth layers of its own.

        Inside a module that does only a part of the model's work, parts of one busy module (the projections of
        attention, the convolution of a shortcut) do not count.
        """
        inside_it = sum(work for module, work in self.flow.work.items() if at(module, path))
        large = self._module(path) is self.model or inside_it >= _NEARLY_ALL * self.work
        parts = [part for part in region if large or sum(needs[unit].busy for unit in part) > 1]
        work = [sum(needs[unit].work for unit in part) for part in parts]
        return sum(work) - max(work, default=0) > _SHARE * self.work

    @property
    def work(self) -> int:
        """Forward FLOPs of it all."""
        return sum(self.flow.work.values())

    def _opened(self, units: Sequence[str], blocks: list[str], needs: dict[str, Needs]) -> list[str] | None:
        """The blocks with those of units that fork inside in place of these units; None where none does."""
        # those that do enough to fork, and are not some of several alike: these are layers as they are
        large = (unit for unit in units if needs[unit].work > _SHARE * self.work and needs[unit].busy > 1)
        opened = {unit: self.blocks_of(unit, self._blocks(unit)) for unit in large if self._alone(unit)}
        if not any(opened.values()):
            return None
        kept = [block for block in blocks if not opened.get(block)]
        return [*kept, *(inner for found in opened.values() for inner in found or ())]

    def _part(self, part: Sequence[str], units: Sequence[str]) -> list[str]:
        """The layers of a branch, found inside the outermost modules that hold nothing else and run.

        Modules without parameters that run inside it stay the code of others; those at its ends are layers.
        """
        others = [unit for unit in units if unit not in part]
        roots = dict[str, None]()
        for unit in part:  # the outermost module around it that holds none of the others, and runs once
            above = [unit.rsplit(".", cut)[0] for cut in range(unit.count("."), -1, -1)]
            free = (path for path in above if self.calls[path] == 1 and not any(at(other, path) for other in others))
            roots[next(free, unit)] = None
        ran = sorted((inner for root in roots for inner in self._inner(root)), key=self.places.__getitem__)
        weighty = [place for place, unit in enumerate(ran) if _is_weighty(self._module(unit))]
        inner = range(weighty[0], weighty[-1]) if weighty else range(0)
        return [
            unit for place, unit in enumerate(ran) if place in weighty or (place not in inner and self.calls[unit] == 1)
        ]

    def _module(self, path: str) -> nn.Module:
        return self.model.get_submodule(path)

    def _inner(self, root: str) -> list[str]:
        """The units of a module that ran; itself where it has no blocks."""
        blocks = self._blocks(root)
        blocks = self.blocks_of(root, blocks) or blocks
        return [inner for inner in self._units(root, blocks) if inner in self.calls] if blocks else [root]
