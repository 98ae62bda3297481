"""Layers of models with independent sub-networks: none of them mixes modules of two.

A model forks where modules that it runs do not depend on each other (two towers, heads of a trunk, encoders of several
cameras) and more than one of these parts does a fair share of the work. Each part's layers are found inside its own
modules then, and none of them is left among what runs before or after the blocks. Models that do not fork keep the
layers they had; an Inception block is one layer, as every repeated block is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import count, takewhile
from operator import or_

import networkx
from torch import nn

from galvatron_lite.model.discover_blocks import at, find_blocks, inside, unit_paths
from galvatron_lite.model.order import bits, order_of
from galvatron_lite.model.trace_flow import DataFlow, Needs, holders_of, needs_of

_SHARE = 0.02
"""Of the model's work that all parts of a region but the largest must do: they are the most that a fork could save."""
_NEARLY_ALL = 0.75  # of the model's work: a module that does as much stands for the model


def forked_blocks(model: nn.Module, flow: DataFlow, order: Sequence[str], blocks: list[str]) -> list[str] | None:
    """Blocks such that no layer mixes modules that do not depend on each other; None where the model does not fork."""
    forks = _Forks(model, flow, Counter(order), dict(zip(dict.fromkeys(order), count(), strict=False)))
    found = forks.blocks_of("", blocks)
    if found is None:
        return None
    places = {path: place for place, (path, _) in enumerate(model.named_modules())}
    return sorted(found, key=places.__getitem__)


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
        found = [inner for part in parts for inner in self._part(part, units)]
        trunk = [unit for unit in units if not any(unit in part for part in parts)]
        kept = [block for block in blocks if block in trunk]
        return [*found, *(self._opened(trunk, kept, needs) or kept or self._heavy(trunk, needs))]

    def _closed(self, path: str, regions: Sequence[Sequence[Sequence[str]]]) -> list[str]:
        """Modules that hold all parts of a region and are of a class that there are several of: blocks as they are."""
        around = {_around([unit for part in region for unit in part]) for region in regions}
        return [one for one in around if inside(one, path) and not self._alone(one)]

    def _alone(self, path: str) -> bool:
        """Whether a module is the only one of its class, or a plain row of others."""
        kind = type(self._module(path))
        return kind is nn.Sequential or sum(type(module) is kind for module in self.model.modules()) == 1

    def _units(self, path: str, blocks: Sequence[str]) -> list[str]:
        module, below = self._module(path), f"{path}." if path else ""
        own = [block.removeprefix(below) for block in blocks if inside(block, path)]
        return [f"{below}{unit}" for unit in unit_paths(module, own)]

    def _blocks(self, path: str) -> list[str]:
        """Blocks inside a module by itself, full paths."""
        return [f"{path}.{block}" for block in find_blocks(self._module(path))]

    def _regions(self, needs: dict[str, Needs]) -> list[list[list[str]]]:
        """Where units fall into parts that do not depend on each other: region by region, the units of each part."""
        ran = sorted((unit for unit, one in needs.items() if one.ran and self._is_one(unit)), key=self._place)
        graph: networkx.DiGraph[str] = networkx.DiGraph()
        graph.add_nodes_from(ran)
        graph.add_edges_from((earlier, unit) for unit in ran for earlier in needs[unit].earlier.intersection(ran))
        rounds = {min(group, key=self._place): group for group in networkx.strongly_connected_components(graph)}
        home = {unit: first for first, group in rounds.items() for unit in group}
        order = order_of(_condensed(graph, home))
        bit = {unit: 1 << order.names.index(first) for unit, first in home.items()}
        ties = self._ties(bit, 1 << len(order.names))
        return [
            [
                sorted((unit for place in bits(part) for unit in rounds[order.names[place]]), key=self._place)
                for part in region
            ]
            for region in order.regions((1 << len(order.names)) - 1, ties)
        ]

    def _is_one(self, unit: str) -> bool:
        """Whether a unit stands for one thing: modules without state that run here and there are code of others."""
        module = self._module(unit)
        return self.calls[unit] == 1 or any(True for _ in (*module.parameters(), *module.buffers()))

    def _place(self, unit: str) -> int:
        return self.places[unit]

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
        large = self._module(path) is self.model or self._work(path) >= _NEARLY_ALL * self.work
        parts = [part for part in region if large or sum(needs[unit].busy for unit in part) > 1]
        work = [sum(needs[unit].work for unit in part) for part in parts]
        return sum(work) - max(work, default=0) > _SHARE * self.work

    @property
    def work(self) -> int:
        """Forward FLOPs of it all."""
        return sum(self.flow.work.values())

    def _work(self, path: str) -> int:
        return sum(work for module, work in self.flow.work.items() if at(module, path))

    def _opened(self, units: Sequence[str], blocks: list[str], needs: dict[str, Needs]) -> list[str] | None:
        """The blocks with those of units that fork inside in place of these units; None where none does."""
        opened = {unit: self.blocks_of(unit, self._blocks(unit)) for unit in units if self._may_fork(unit, needs[unit])}
        if not any(opened.values()):
            return None
        kept = [block for block in blocks if not opened.get(block)]
        return [*kept, *(inner for found in opened.values() for inner in found or ())]

    def _may_fork(self, unit: str, needs: Needs) -> bool:
        """Whether a unit does enough to fork, and is not one of several alike: those are layers as they are."""
        return needs.work > _SHARE * self.work and needs.busy > 1 and self._alone(unit)

    def _part(self, part: Sequence[str], units: Sequence[str]) -> list[str]:
        """The layers of a branch, found inside the outermost modules that hold nothing else and run.

        Modules without parameters that run inside it stay the code of others; those at its ends are layers.
        """
        others = [unit for unit in units if unit not in part]
        roots = dict.fromkeys(self._root(unit, others) for unit in part)
        ran = sorted((inner for root in roots for inner in self._inner(root)), key=self._place)
        weighty = [place for place, unit in enumerate(ran) if any(True for _ in self._module(unit).parameters())]
        inner = range(weighty[0], weighty[-1]) if weighty else range(0)
        return [
            unit for place, unit in enumerate(ran) if place in weighty or (place not in inner and self.calls[unit] == 1)
        ]

    def _root(self, unit: str, others: Sequence[str]) -> str:
        """The outermost module around a unit that holds none of the others, and runs once."""
        above = [unit.rsplit(".", cut)[0] for cut in range(unit.count("."), -1, -1)]
        free = (path for path in above if self.calls[path] == 1 and not any(at(other, path) for other in others))
        return next(free, unit)

    def _module(self, path: str) -> nn.Module:
        return self.model.get_submodule(path)

    def _inner(self, root: str) -> list[str]:
        """The units of a module that ran; itself where it has no blocks."""
        own = self._blocks(root)
        own = self.blocks_of(root, own) or own
        return [inner for inner in self._units(root, own) if inner in self.calls] if own else [root]

    def _heavy(self, units: Sequence[str], needs: dict[str, Needs]) -> list[str]:
        """The blocks of units of which none is one."""
        own = (unit for unit in units if needs[unit].work > _SHARE * self.work)
        return [block for unit in own for block in self._blocks(unit)]


def _around(units: Sequence[str]) -> str:
    """The innermost module that holds all of several units."""
    parts = [unit.split(".") for unit in units]
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False)))


def _condensed(graph: networkx.DiGraph[str], home: dict[str, str]) -> networkx.DiGraph[str]:
    """The graph of what ``home`` says units count as: units that run again behind each other count as one."""
    made: networkx.DiGraph[str] = networkx.DiGraph()
    made.add_nodes_from(home.values())
    made.add_edges_from((home[one], home[other]) for one, other in graph.edges if home[one] != home[other])
    return made
