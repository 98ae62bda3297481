"""What all tools' files have in common: one strategy for all layers, and a list of what they cannot say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.registry import added_degrees
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import LayerRun, Mode, Plan

EDGES = ("before", "after")
"""Layers around the blocks (embedding; norm, head and loss), by the names that plans give them."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A plan in a tool's words."""

    tool: str  # its name
    text: str  # the file
    left_out: tuple[str, ...]  # what of the plan the file does not say, a line each


@dataclass(frozen=True, slots=True)
class StageCut:
    """One pipeline stage: how many blocks it has, and whether the layers before and after them are in it."""

    blocks: int
    before: bool
    after: bool


def main_strategy(plan: Plan) -> Strategy:
    """The strategy of the most blocks; of the most layers where there are none. The first of equal ones."""
    counts: Counter[Strategy] = Counter()
    runs = [run for stage in plan.stages for run in stage.runs]
    blocks = [run for run in runs if run.first not in EDGES]
    for run in blocks or runs:
        counts[run.strategy] += run.count
    return counts.most_common(1)[0][0] if counts else Strategy()


def cuts(plan: Plan) -> tuple[StageCut, ...]:
    """The pipeline's stages in the order of the model."""
    made = []
    for stage in plan.stages:
        names = {run.first for run in stage.runs}
        blocks = sum(run.count for run in stage.runs if run.first not in EDGES)
        made.append(StageCut(blocks, "before" in names, "after" in names))
    return tuple(made)


_OF_BLOCKS = ("recompute", "expert", "expert_tensor", "sequence_parallel")
"""Fields that tools set for blocks; what they do with embedding and head follows."""


def unlike(plan: Plan, main: Strategy, apart: Collection[str] = ()) -> Iterator[str]:
    """Layers that do otherwise than the main strategy.

    Args:
        plan: holds the layers.
        main: what the file says of all layers.
        apart: fields of ``Strategy`` that the file says in another way.
    """
    plain = {name: getattr(main, name) for name in apart}
    for stage in plan.stages:
        for run in stage.runs:
            own = replace(run.strategy, **plain)
            if run.first in EDGES:
                own = replace(own, **{name: getattr(main, name) for name in _OF_BLOCKS})
            if own != main:
                yield f"{_named(run)}: {run.strategy}, instead of {main}"


def _named(run: LayerRun) -> str:
    return run.first if run.first == run.last else f"{run.first} … {run.last}"


def lacking(strategy: Strategy, words: Mapping[str, str]) -> Iterator[str]:
    """What a strategy uses of what a tool does not have."""
    plain = Strategy()
    for one in fields(Strategy):
        value = getattr(strategy, one.name)
        if one.name in words and value != getattr(plain, one.name):
            yield f"{words[one.name]} ({one.name} {getattr(value, 'value', value)})"
    yield from (f"{one.means} ({one.name} {degree})" for one, degree in added_degrees(strategy))


PICTURES = {
    "depth": "shares of the pixels", "height": "shares of the pixels", "width": "shares of the pixels",
    "filters": "shares of the output channels", "channels": "shares of the input channels",
}  # fmt: skip
"""Ways to split convolutions, which tools for language models do not have."""


def kinds(plan: Plan) -> Iterator[str]:
    """What kinds of plan no tool's file says."""
    if plan.mode is not Mode.TRAINING:
        yield "inference: the file is of a training run"
    if plan.branches:
        yield f"branches on devices of their own: {', '.join(one.name for one in plan.branches)}"
    if plan.cyclic is not None:
        yield f"delayed gradients ({plan.cyclic.rule.value}, {plan.cyclic.setting.value}), and its stages"


def recomputed(plan: Plan, recompute: Recompute) -> int:
    """Blocks that compute so much again."""
    return sum(
        run.count
        for stage in plan.stages
        for run in stage.runs
        if run.first not in EDGES and run.strategy.recompute is recompute
    )


def commented(lines: Collection[str]) -> str:
    """Lines of a file's head, for formats whose comments begin with ``#``; what does not print is escaped."""
    escaped = ("".join(each if each.isprintable() else repr(each)[1:-1] for each in line) for line in lines)
    return "".join(f"# {line}\n" for line in escaped)


def head(plan: Plan, tool: str, left_out: Collection[str]) -> str:
    """The first lines of a file: what it is of, and what it does not say."""
    first = f"{plan.model} on {plan.devices} devices, batch {plan.global_batch}, for {tool}"
    return commented([first, *(f"not said here: {line}" for line in left_out)])
