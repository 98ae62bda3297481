"""Which devices work together in each dimension, drawn node by node. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from markupsafe import Markup

from galvatron_lite.model.sides import SIDES
from galvatron_lite.parallelism.ranks import expert_slices, strides_of
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.report.svg import boxes, element, text

WIDTH = 1000.0
HUES = 6
"""Colours of groups; the seventh has that of the first."""
_MOST = 1024
"""Devices that are drawn."""
_WRITTEN = 256
"""Of no more devices the number of the group is written into each."""
_NAMED = 4
"""Groups that are named in a sentence."""
GroupOf = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Map:
    """The groups of one dimension.

    Attributes:
        name: of the dimension.
        layers: for which it holds.
        size: devices of a group.
        count: how many groups.
        words: the first groups by their ranks, and how far they reach.
        picture: every device with the number of its group.
    """

    name: str
    layers: str
    size: int
    count: int
    words: str
    picture: Markup


def maps_of(plan: Plan, node: int) -> list[Map]:
    """A map of the pipeline's groups, and of every dimension that the plan's most frequent strategies use.

    Args:
        plan: in stages.
        node: devices of a node.
    """
    found = []
    if plan.pipeline > 1:
        size = plan.stage_devices
        found.append(_map("pipeline stages", "all layers", plan.devices, node, lambda rank: rank // size))
    known: set[str] = set()
    for strategy, layers in _frequent(plan):
        for name, degree, stride in dimensions_of(strategy):
            if name not in known:
                known.add(name)
                group_of = _grouping(degree, stride, strategy.devices)
                found.append(_map(name, layers, plan.devices, node, group_of))
    return found


def _frequent(plan: Plan) -> list[tuple[Strategy, str]]:
    """Strategies, those of most layers first, and which layers have them."""
    counts: dict[Strategy, int] = {}
    for run in (run for stage in plan.stages for run in stage.runs):
        counts[run.strategy] = counts.get(run.strategy, 0) + run.count
    layers = sum(counts.values())
    order = sorted(counts, key=lambda strategy: -counts[strategy])
    return [(strategy, f"{counts[strategy]} of {layers} layers: {strategy}") for strategy in order]


def dimensions_of(strategy: Strategy) -> list[tuple[str, int, int]]:
    """Dimensions that split a layer: name, degree, and ranks from one member to the next."""
    strides = strides_of(strategy)
    found = [(name, int(getattr(strategy, name)), int(strides[name])) for name in ("data", "zero", "context", "tensor")]
    found.append(("expert", strategy.expert, int(expert_slices(strategy))))
    inner = strategy.slices
    for side in reversed(SIDES):
        found.append((side, int(getattr(strategy, side)), inner))
        inner *= int(getattr(strategy, side))
    found += [("filters", strategy.filters, strategy.channels), ("channels", strategy.channels, 1)]
    return [one for one in found if one[1] > 1]


def _grouping(degree: int, stride: int, stage: int) -> GroupOf:
    """The least rank of a rank's group."""

    def group_of(rank: int) -> int:
        return rank - (rank % stage) // stride % degree * stride

    return group_of


def _map(name: str, layers: str, devices: int, node: int, group_of: GroupOf) -> Map:
    numbers: dict[int, int] = {}
    places = [numbers.setdefault(group_of(rank), len(numbers)) for rank in range(devices)]
    members: list[list[int]] = [[] for _ in numbers]
    for rank, number in enumerate(places):
        members[number].append(rank)
    words = f"{_said(members)}; {_reach(members, node)}"
    return Map(name, layers, len(members[0]), len(members), words, _picture(name, places, node))


def _said(members: Sequence[Sequence[int]]) -> str:
    shown = [f"{number}: {_ranks(ranks)}" for number, ranks in enumerate(members[:_NAMED])]
    return "; ".join(shown) + (f"; … {len(members) - _NAMED} more" if len(members) > _NAMED else "")


def _ranks(ranks: Sequence[int]) -> str:
    """``0–7``; ``0, 4, 8, 12``; of many the first ones."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}–{ranks[-1]}"
    return ", ".join(map(str, ranks[:8])) + (f", … {ranks[-1]}" if len(ranks) > 8 else "")


def _reach(members: Sequence[Sequence[int]], node: int) -> str:
    nodes = {len({rank // node for rank in ranks}) for ranks in members}
    if nodes == {1}:
        return "each within a node"
    return f"each over {max(nodes)} nodes" if len(nodes) == 1 else f"each over {min(nodes)} to {max(nodes)} nodes"


def _picture(name: str, places: Sequence[int], node: int) -> Markup:
    """Nodes in rows, a square for each device."""
    shown = places[:_MOST]
    cell = 22.0 if len(shown) <= 64 else 17.0 if len(shown) <= _WRITTEN else 8.0
    width = cell * min(node, 16) + 10
    each, lines = max(int(WIDTH // width), 1), -(-min(node, len(shown)) // 16)
    tall = lines * cell + 20
    squares: dict[int, list[tuple[float, float, float, float]]] = {}
    words, drawn = [], []
    for rank, number in enumerate(shown):
        place, inside = divmod(rank, node)
        x, y = place % each * width + inside % 16 * cell, place // each * tall + 14 + inside // 16 * cell
        squares.setdefault(number % HUES, []).append((x, y, cell - 2, cell - 2))
        if len(shown) <= _WRITTEN:
            words.append(
                text(
                    x + cell / 2 - 1, y + cell / 2 + 3, str(number), anchor="middle", class_=f"on-group-{number % HUES}"
                )
            )
        if inside == 0 and cell > 8:
            drawn.append(text(x, y - 3, f"node {place}"))
    paths = [element("path", d=boxes(own), class_=f"group-{hue}") for hue, own in sorted(squares.items())]
    nodes = ceil(len(shown) / node)
    rows, columns = ceil(nodes / each), min(nodes, each)
    label = f"{len(shown)} of {len(places)} devices by their {name} group; the sentence beside it says the same."
    return element(
        "svg", *paths, *words, *drawn, viewBox=f"0 0 {columns * width:.0f} {rows * tall:.0f}", role="img",
        aria_label=label, style=f"max-width:{columns * width:.0f}px", class_="map",
    )  # fmt: skip
