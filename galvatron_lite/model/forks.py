"""Blocks of models that fork: modules that do not depend on each other must not be parts of one layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import count, takewhile
from operator import or_

import networkx
from torch import nn

from galvatron_lite.model.blocks import find_blocks, has_parameters, unit_paths
from galvatron_lite.model.order import bits, order_of
from galvatron_lite.model.trace.flow import DataFlow, Needs, at, holders_of, inside, needs_of

_SHARE = 0.02
"""Of the model's work: all parts of a region except the largest must do more, as that is the most that a fork saves."""
_NEARLY_ALL = 0.75  # of the model's work: a module that does as much stands for the model


def forked_blocks(model: nn.Module, flow: DataFlow, order: Sequence[str], blocks: list[str]) -> list[str] | None:
    """Return blocks so that no layer mixes independent modules; None if the model does not fork.

    Args:
        flow: of the model's run.
        order: paths of modules in the order they ran.
        blocks: paths of the blocks of a model that does not fork.
    """
    forks = _Forks(model, flow, Counter(order), dict(zip(dict.fromkeys(order), count(), strict=False)))
    found = forks.blocks_of("", blocks)
    return None if found is None else [path for path, _ in model.named_modules() if path in set(found)]


@dataclass(frozen=True, slots=True)
class _Forks:
    """Finds forks inside the modules of a model that ran.

    A region of a fork is a list of parts that do not depend on each other; a part is a list of units (``unit_paths``).
    """

    model: nn.Module
    flow: DataFlow
    calls: Counter[str]  # runs of each module path
    indices: dict[str, int]  # of module paths, in the order of first runs

    @property
    def work(self) -> int:
        """Forward FLOPs of the model."""
        return sum(self.flow.work.values())

    def blocks_of(self, path: str, blocks: list[str]) -> list[str] | None:
        """The blocks of a module that forks, as full paths; None if it does not and ``blocks`` are its blocks."""
        units = self._units(path, blocks)
        needs = needs_of(self.flow, self.model, {unit: [unit] for unit in units})
        regions = [region for region in self._regions(needs) if self._is_worthwhile(path, region, needs)]
        closed = self._closed_blocks(path, regions)
        if closed:
            kept = [*(block for block in blocks if not any(at(block, other) for other in closed)), *closed]
            return self.blocks_of(path, kept) or kept
        parts = [part for region in regions for part in region]
        if not parts:
            return self._opened(units, blocks, needs)
        trunk = [unit for unit in units if not any(unit in part for part in parts)]
        kept = [block for block in blocks if block in trunk]
        heavy = (unit for unit in trunk if needs[unit].work > _SHARE * self.work)
        rest = self._opened(trunk, kept, needs) or kept or [block for unit in heavy for block in self._blocks(unit)]
        return [*(layer for part in parts for layer in self._layers_of_part(part, units)), *rest]

    def _closed_blocks(self, path: str, regions: Sequence[Sequence[Sequence[str]]]) -> list[str]:
        """Modules that hold all parts of a region and are not the only one of their class: they stay blocks."""
        units = ([unit.split(".") for part in region for unit in part] for region in regions)
        steps = (takewhile(lambda names: len(set(names)) == 1, zip(*region, strict=False)) for region in units)
        around = {".".join(names[0] for names in common) for common in steps}
        return [holder for holder in around & self.flow.ran if inside(holder, path) and not self._is_alone(holder)]

    def _is_alone(self, path: str) -> bool:
        """Whether a module is the only one of its class, or a plain Sequential."""
        kind = type(self._module(path))
        return kind is nn.Sequential or sum(type(module) is kind for module in self.model.modules()) == 1

    def _module(self, path: str) -> nn.Module:
        return self.model.get_submodule(path)

    def _units(self, path: str, blocks: Sequence[str]) -> list[str]:
        """The units of a module, as full paths."""
        prefix = f"{path}." if path else ""
        local = [block.removeprefix(prefix) for block in blocks if inside(block, path)]
        order = [ran.removeprefix(prefix) for ran in self.flow.ran if inside(ran, path)]
        return [f"{prefix}{unit}" for unit in unit_paths(self._module(path), local, order)]

    def _blocks(self, path: str) -> list[str]:
        """The blocks that ran of a module by itself, as full paths."""
        paths = (f"{path}.{block}" for block in find_blocks(self._module(path)))
        return [block for block in paths if block in self.flow.ran]

    def _regions(self, needs: dict[str, Needs]) -> list[list[list[str]]]:
        """The regions into which units fall, in running order."""
        index = self.indices.__getitem__
        ran = sorted((unit for unit, need in needs.items() if need.ran and self._counts(unit)), key=index)
        graph: networkx.DiGraph[str] = networkx.DiGraph()
        graph.add_nodes_from(ran)
        graph.add_edges_from((earlier, unit) for unit in ran for earlier in needs[unit].earlier.intersection(ran))
        # units that run again after each other count as one, by the name of the first
        cycles = {min(group, key=index): group for group in networkx.strongly_connected_components(graph)}
        first = {unit: name for name, group in cycles.items() for unit in group}
        condensed: networkx.DiGraph[str] = networkx.DiGraph()
        condensed.add_nodes_from(first.values())
        condensed.add_edges_from((first[a], first[b]) for a, b in graph.edges if first[a] != first[b])
        order = order_of(condensed)
        bit = {unit: 1 << order.names.index(name) for unit, name in first.items()}
        return [
            [
                sorted((unit for place in bits(part) for unit in cycles[order.names[place]]), key=index)
                for part in region
            ]
            for region in order.regions((1 << len(order.names)) - 1, self._ties(bit, 1 << len(order.names)))
        ]

    def _counts(self, unit: str) -> bool:
        """Whether a unit is work of its own: modules without state that run in several places are code of others."""
        module = self._module(unit)
        return self.calls[unit] == 1 or any(True for _ in (*module.parameters(), *module.buffers()))

    def _ties(self, bit: dict[str, int], outside: int) -> list[int]:
        """Sets of units, as bits, that must stay together: they share a parameter, or code around some reads another's.
        Code around all units, or around none, ties what it reads to the bit ``outside``."""
        holders = holders_of(self.model, {unit: [unit] for unit in bit})
        ties = [reduce(or_, (bit[unit] for unit in units)) for units in holders.values() if len(units) > 1]
        for name, units in holders.items():
            held = reduce(or_, (bit[unit] for unit in units))
            for path in self.flow.readers[name]:
                if not any(at(path, unit) for unit in units):
                    near = [bit[unit] for unit in bit if at(unit, path) or at(path, unit)]
                    ties.append(held | (outside if len(near) in (0, len(bit)) else reduce(or_, near)))
        return ties

    def _is_worthwhile(self, path: str, region: Sequence[Sequence[str]], needs: dict[str, Needs]) -> bool:
        """Whether a region does enough work for layers of its own.

        Parts of one busy module (the projections of attention, the convolution of a shortcut) count only in a module
        that does nearly all of the model's work.
        """
        inner_work = sum(work for module, work in self.flow.work.items() if at(module, path))
        large = self._module(path) is self.model or inner_work >= _NEARLY_ALL * self.work
        parts = [part for part in region if large or sum(needs[unit].busy for unit in part) > 1]
        work = [sum(needs[unit].work for unit in part) for part in parts]
        return sum(work) - max(work, default=0) > _SHARE * self.work

    def _opened(self, units: Sequence[str], blocks: list[str], needs: dict[str, Needs]) -> list[str] | None:
        """The blocks, with the blocks of units that fork inside in place of these units; None if no unit forks.

        Only units with enough work that are the only ones of their class may be opened; others are layers as they are.
        """
        large = (unit for unit in units if needs[unit].work > _SHARE * self.work and needs[unit].busy > 1)
        opened = {unit: self.blocks_of(unit, self._blocks(unit)) for unit in large if self._is_alone(unit)}
        if not any(opened.values()):
            return None
        kept = [block for block in blocks if not opened.get(block)]
        return [*kept, *(inner for found in opened.values() for inner in found or ())]

    def _layers_of_part(self, part: Sequence[str], units: Sequence[str]) -> list[str]:
        """The layers of a branch, found inside the outermost modules that hold nothing else.

        Modules without parameters between its layers with parameters are code of others; those at its ends are layers.
        """
        others = [unit for unit in units if unit not in part]
        roots = dict[str, None]()
        for unit in part:  # the outermost module around it that runs once and holds none of the others
            above = [unit.rsplit(".", cut)[0] for cut in range(unit.count("."), -1, -1)]
            free = (path for path in above if self.calls[path] == 1 and not any(at(other, path) for other in others))
            roots[next(free, unit)] = None
        ran = sorted((unit for root in roots for unit in self._units_of_root(root)), key=self.indices.__getitem__)
        weighty = [index for index, unit in enumerate(ran) if has_parameters(self._module(unit))]
        between = range(weighty[0], weighty[-1]) if weighty else range(0)
        return [
            unit
            for index, unit in enumerate(ran)
            if index in weighty or (index not in between and self.calls[unit] == 1)
        ]

    def _units_of_root(self, root: str) -> list[str]:
        """The units of a module that ran; the module itself if it has no blocks."""
        blocks = self._blocks(root)
        blocks = self.blocks_of(root, blocks) or blocks
        return [unit for unit in self._units(root, blocks) if unit in self.calls] if blocks else [root]
