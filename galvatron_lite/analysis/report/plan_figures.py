"""Figures of a plan: its layers by strategy, and the groups of devices of each dimension.

A strategy has a letter, a hue by what it splits most, and a pattern by what it recomputes. The hues are those of
M. Okabe and K. Ito, "Color Universal Design" (jfly.uni-koeln.de/color), which people with any colour vision tell apart;
letters and patterns say the same without colour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.ranks import expert_slices
from galvatron_lite.parallelism.registry import in_words
from galvatron_lite.parallelism.strategy import Offload, Strategy, degree_names
from galvatron_lite.plans.schema import LayerRun, Plan
from galvatron_lite.svg import element, figure, rectangle, text

SHADES = 4  # of each hue
_DIMENSIONS = ("tensor", "context", "expert", "spatial", "slices", "batch_degree")
HUES = ("whole", *_DIMENSIONS)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PATTERNS = {Recompute.NONE: "", Recompute.SELECTIVE: "sparse", Recompute.FULL: "dense"}


@dataclass(frozen=True, slots=True)
class StrategyStyle:
    """How a strategy is drawn."""

    letter: str  # of the legend
    fill: str  # class of the style sheet
    pattern: str  # name of a pattern that lies over it; empty for none
    strategy: str  # short name
    words: str  # the same in words
    layers: int  # how many layers of all plans do so


def looks_of(plans: Sequence[Plan]) -> dict[Strategy, StrategyStyle]:
    """The look of every strategy of some plans, in the order in which they are met."""
    counts: dict[Strategy, int] = {}
    for run in (run for plan in plans for _, runs in parts_of(plan) for run in runs):
        counts[run.strategy] = counts.get(run.strategy, 0) + run.count
    shades: dict[str, int] = {}
    looks = {}
    for place, (strategy, count) in enumerate(counts.items()):
        hue = _hue_of(strategy)
        shade = shades.get(hue, 0) % SHADES
        shades[hue] = shades.get(hue, 0) + 1
        fill = f"hue-{hue.removesuffix('_degree')}-{shade}"
        turn, number = divmod(place, len(_LETTERS))  # ``A`` … ``Z``, then ``A2`` …
        letter = _LETTERS[number] + (str(turn + 1) if turn else "")
        pattern = "dots" if strategy.offload is not Offload.NONE else _PATTERNS[strategy.recompute]
        looks[strategy] = StrategyStyle(letter, fill, pattern, str(strategy), in_words(strategy), count)
    return looks


def _hue_of(strategy: Strategy) -> str:
    """The dimension that a strategy splits most; of equal ones the first of ``HUES``."""
    degrees = {name: int(getattr(strategy, name)) for name in _DIMENSIONS}
    most = max(degrees.values())
    return "whole" if most == 1 else next(name for name, degree in degrees.items() if degree == most)


WIDTH, _HEIGHT, _GAP = 1000.0, 30.0, 4.0
_LETTER, _LABEL = 13.0, 26.0
"""The least width that a letter, or the number of a stage, is written into."""
Part = tuple[str, Sequence[LayerRun]]


def layer_strip(plan: Plan, looks: Mapping[Strategy, StrategyStyle]) -> Markup:
    """The layers of a plan, first to last; of branches on devices of their own each one behind the other layers."""
    parts = parts_of(plan)
    gap = min(_GAP, WIDTH / (4 * len(parts)))
    layers = sum(run.count for _, runs in parts for run in runs)
    each = (WIDTH - gap * (len(parts) - 1)) / max(layers, 1)
    drawn: list[Markup] = []
    place = 0.0
    for name, runs in parts:
        width = each * sum(run.count for run in runs)
        if width >= _LABEL:
            drawn.append(text(place, 11, f"stage {name}" if width >= 3 * _LABEL and name.isdigit() else name))
        for run in runs:
            drawn += _run(name, run, looks[run.strategy], place, each * run.count)
            place += each * run.count
        place += gap
    label = (
        f"{layers} layers of {plan.model} in {len(parts)} parts, coloured by strategy; the table below says the same."
    )
    return figure(WIDTH, _HEIGHT + 18, label, *drawn, class_="strip")


def parts_of(plan: Plan) -> list[Part]:
    """Stages, then branches, with their names."""
    parts: list[Part] = [(str(number), stage.runs) for number, stage in enumerate(plan.stages)]
    return parts + [(branch.name, branch.runs) for branch in plan.branches]


def _run(name: str, run: LayerRun, look: StrategyStyle, place: float, width: float) -> list[Markup]:
    layers = run.first if run.count == 1 else f"{run.first} … {run.last} ({run.count} layers)"
    title = f"{name}: {layers}: {look.letter}, {look.strategy}: {look.words}"
    drawn = [rectangle(place, 18, width, _HEIGHT, f"cell {look.fill}", title)]
    if look.pattern:
        drawn.append(element("rect", x=place, y=18, width=width, height=_HEIGHT, fill=f"url(#{look.pattern})",
                             pointer_events="none"))  # fmt: skip
    if width >= _LETTER * max(len(look.letter), 1):
        drawn.append(
            text(place + width / 2, 18 + _HEIGHT / 2 + 5, look.letter, anchor="middle", class_=f"on-{look.fill}")
        )
    return drawn


_NAMED = 4  # groups that are named in a sentence
GroupOf = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class DeviceGroups:
    """The groups of devices of one dimension."""

    name: str  # of the dimension
    layers: str  # for which it holds
    size: int  # devices of a group
    count: int  # how many groups
    words: str  # the first groups by their ranks, and how far they reach


def groups_in(plan: Plan, node: int) -> list[DeviceGroups]:
    """The groups of the pipeline, and of every dimension that the plan's most frequent strategies use."""
    groups = []
    if plan.pipeline > 1:
        size = plan.stage_devices
        groups.append(_groups("pipeline stages", "all layers", plan.devices, node, lambda rank: rank // size))
    seen: set[str] = set()
    for strategy, layers in _frequent(plan):
        for name, degree, stride in dimensions_of(strategy):
            if name not in seen:
                seen.add(name)

                def first(rank: int, degree: int = degree, stride: int = stride, stage: int = strategy.devices) -> int:
                    """The least rank of a rank's group."""
                    return rank - (rank % stage) // stride % degree * stride

                groups.append(_groups(name, layers, plan.devices, node, first))
    return groups


def _frequent(plan: Plan) -> list[tuple[Strategy, str]]:
    counts: dict[Strategy, int] = {}
    for run in (run for stage in plan.stages for run in stage.runs):
        counts[run.strategy] = counts.get(run.strategy, 0) + run.count
    layers = sum(counts.values())
    order = sorted(counts, key=lambda strategy: -counts[strategy])
    return [(strategy, f"{counts[strategy]} of {layers} layers: {strategy}") for strategy in order]


def dimensions_of(strategy: Strategy) -> list[tuple[str, int, int]]:
    """Dimensions that split a layer: name, degree, and ranks from one member to the next."""
    inner, dimensions = 1, [("expert", strategy.expert, int(expert_slices(strategy)))]
    for name in reversed(degree_names()):  # ranks are row-major, the last degree innermost
        degree = int(getattr(strategy, name))
        dimensions.append((name, degree, inner))
        inner *= degree
    return [dimension for dimension in reversed(dimensions) if dimension[1] > 1]


def _groups(name: str, layers: str, devices: int, node: int, group_of: GroupOf) -> DeviceGroups:
    members: dict[int, list[int]] = {}
    for rank in range(devices):
        members.setdefault(group_of(rank), []).append(rank)
    groups = list(members.values())
    shown = [f"{number}: {_ranks(ranks)}" for number, ranks in enumerate(groups[:_NAMED])]
    shown += [f"… {len(groups) - _NAMED} more"] * (len(groups) > _NAMED)
    nodes = {len({rank // node for rank in ranks}) for ranks in groups}
    least, most = min(nodes), max(nodes)
    reach = "each within a node" if most == 1 else f"each over {most} nodes"
    if least != most:
        reach = f"each over {least} to {most} nodes"
    return DeviceGroups(name, layers, len(groups[0]), len(groups), f"{'; '.join(shown)}; {reach}")


def _ranks(ranks: Sequence[int]) -> str:
    """``0–7``; ``0, 4, 8, 12``; of many the first ones."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}–{ranks[-1]}"
    return ", ".join(map(str, ranks[:8])) + (f", … {ranks[-1]}" if len(ranks) > 8 else "")
