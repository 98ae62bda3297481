"""Figures of a plan: its layers by strategy, and the groups of devices of each dimension.

A strategy has a letter, a hue by what it splits most, and a pattern by what it recomputes. The hues are those of
M. Okabe and K. Ito, "Color Universal Design" (jfly.uni-koeln.de/color), which people with any colour vision tell apart;
letters and patterns say the same without colour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.ranks import strides_of
from galvatron_lite.parallelism.registry import dimensions, in_words
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import LayerRun, Plan
from galvatron_lite.svg import element, figure, rectangle, text

SHADES = 4  # of each hue
_HUES = ("tensor", "context", "expert", "spatial", "slices", "batch_degree")  # degrees of ``Strategy``
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PATTERNS = {Recompute.NONE: "", Recompute.SELECTIVE: "sparse", Recompute.FULL: "dense"}
WIDTH, _HEIGHT, _GAP = 1000.0, 30.0, 4.0
_LETTER_WIDTH, _LABEL_WIDTH = 13.0, 26.0  # of the smallest cells with a letter, and stages with a number
_NAMED_GROUPS = 4  # groups of devices that are listed


@dataclass(frozen=True, slots=True)
class StrategyStyle:
    """How a strategy is drawn."""

    letter: str  # of the legend
    fill: str  # class of the style sheet
    pattern: str  # over the fill; empty for none
    strategy: str  # short name
    words: str  # in words
    layers: int  # layers of all plans that have the strategy


def strategy_styles(plans: Sequence[Plan]) -> dict[Strategy, StrategyStyle]:
    """The style of every strategy of the plans, in the order of the first layer that has it."""
    counts = Counter[Strategy]()
    for run in (run for plan in plans for _, runs in named_runs(plan) for run in runs):
        counts[run.strategy] += run.count
    shades = Counter[str]()
    styles = {}
    for number, (strategy, count) in enumerate(counts.items()):
        hue = _hue(strategy)
        fill = f"hue-{hue.removesuffix('_degree')}-{shades[hue] % SHADES}"
        shades[hue] += 1
        turn, index = divmod(number, len(_LETTERS))  # ``A`` … ``Z``, then ``A2`` …
        letter = _LETTERS[index] + (str(turn + 1) if turn else "")
        pattern = "dots" if strategy.offload is not Offload.NONE else _PATTERNS[strategy.recompute]
        styles[strategy] = StrategyStyle(letter, fill, pattern, str(strategy), in_words(strategy), count)
    return styles


def _hue(strategy: Strategy) -> str:
    """The degree that is largest, the first of equal ones; ``whole`` if nothing is split."""
    largest = max(_HUES, key=lambda name: int(getattr(strategy, name)))
    return largest if getattr(strategy, largest) > 1 else "whole"


def named_runs(plan: Plan) -> list[tuple[str, Sequence[LayerRun]]]:
    """The runs of each stage, then of each branch, with its number or name."""
    runs: list[tuple[str, Sequence[LayerRun]]] = [(str(number), stage.runs) for number, stage in enumerate(plan.stages)]
    return runs + [(branch.name, branch.runs) for branch in plan.branches]


def layer_strip(plan: Plan, styles: Mapping[Strategy, StrategyStyle]) -> Markup:
    """Draw the layers of a plan from first to last, then those of each branch."""
    parts = named_runs(plan)
    gap = min(_GAP, WIDTH / (4 * len(parts)))
    layers = sum(run.count for _, runs in parts for run in runs)
    layer_width = (WIDTH - gap * (len(parts) - 1)) / max(layers, 1)
    drawn: list[Markup] = []
    x = 0.0
    for name, runs in parts:
        width = layer_width * sum(run.count for run in runs)
        if width >= _LABEL_WIDTH:
            drawn.append(text(x, 11, f"stage {name}" if width >= 3 * _LABEL_WIDTH and name.isdigit() else name))
        for run in runs:
            drawn += _cell(name, run, styles[run.strategy], x, layer_width * run.count)
            x += layer_width * run.count
        x += gap
    label = (
        f"{layers} layers of {plan.model} in {len(parts)} parts, coloured by strategy; the table below says the same."
    )
    return figure(WIDTH, _HEIGHT + 18, label, *drawn, class_="strip")


def _cell(name: str, run: LayerRun, style: StrategyStyle, x: float, width: float) -> list[Markup]:
    layers = run.first if run.count == 1 else f"{run.first} … {run.last} ({run.count} layers)"
    title = f"{name}: {layers}: {style.letter}, {style.strategy}: {style.words}"
    drawn = [rectangle(x, 18, width, _HEIGHT, f"cell {style.fill}", title)]
    if style.pattern:
        fill = f"url(#{style.pattern})"
        drawn.append(element("rect", x=x, y=18, width=width, height=_HEIGHT, fill=fill, pointer_events="none"))
    if width >= _LETTER_WIDTH * len(style.letter):
        y = 18 + _HEIGHT / 2 + 5
        drawn.append(text(x + width / 2, y, style.letter, anchor="middle", class_=f"on-{style.fill}"))
    return drawn


@dataclass(frozen=True, slots=True)
class DeviceGroups:
    """The groups of devices of one dimension."""

    name: str  # of the dimension
    layers: str  # that are split so
    size: int  # devices of a group
    count: int  # number of groups
    words: str  # the ranks of the first groups, and how many nodes a group spans


def device_groups(plan: Plan, node: int) -> list[DeviceGroups]:
    """The groups of the pipeline, and of every dimension of the layers, by the strategy of most layers that use it.

    Args:
        plan: in stages, without branches.
        node: devices of a node.
    """
    groups = []
    if plan.pipeline > 1:
        size = plan.stage_devices
        groups.append(_groups_of("pipeline stages", "all layers", plan.devices, node, lambda rank: rank // size))
    counts, seen = Counter[Strategy](), set[str]()
    for run in (run for stage in plan.stages for run in stage.runs):
        counts[run.strategy] += run.count
    for strategy, count in counts.most_common():
        layers = f"{count} of {counts.total()} layers: {strategy}"
        for name, degree, stride in split_dimensions(strategy):
            if name not in seen:
                seen.add(name)

                def first(rank: int, degree: int = degree, stride: int = stride, stage: int = strategy.devices) -> int:
                    """The lowest rank of a rank's group."""
                    return rank - (rank % stage) // stride % degree * stride

                groups.append(_groups_of(name, layers, plan.devices, node, first))
    return groups


def split_dimensions(strategy: Strategy) -> list[tuple[str, int, int]]:
    """Dimensions that split a layer: name, degree, and the difference of ranks from one member to the next."""
    spreads = [(one.name, spread.over) for one in dimensions() if (spread := one.spread(strategy)) is not None]
    split = [(name, line.size, int(line.axes[-1].stride)) for name, line in spreads if line is not None]
    split += [(name, getattr(strategy, name), int(stride)) for name, stride in strides_of(strategy).items()]
    return [(name, degree, stride) for name, degree, stride in reversed(split) if degree > 1]


def _groups_of(name: str, layers: str, devices: int, node: int, group_of: Callable[[int], int]) -> DeviceGroups:
    members: dict[int, list[int]] = {}
    for rank in range(devices):
        members.setdefault(group_of(rank), []).append(rank)
    groups = list(members.values())
    listed = [f"{number}: {_ranks(ranks)}" for number, ranks in enumerate(groups[:_NAMED_GROUPS])]
    listed += [f"… {len(groups) - _NAMED_GROUPS} more"] * (len(groups) > _NAMED_GROUPS)
    nodes = {len({rank // node for rank in ranks}) for ranks in groups}
    least, most = min(nodes), max(nodes)
    reach = "each within a node" if most == 1 else f"each over {most} nodes"
    if least != most:
        reach = f"each over {least} to {most} nodes"
    return DeviceGroups(name, layers, len(groups[0]), len(groups), f"{'; '.join(listed)}; {reach}")


def _ranks(ranks: Sequence[int]) -> str:
    """``0–7``, or ``0, 4, 8, 12``; of many the first ones and the last."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}–{ranks[-1]}"
    return ", ".join(map(str, ranks[:8])) + (f", … {ranks[-1]}" if len(ranks) > 8 else "")
