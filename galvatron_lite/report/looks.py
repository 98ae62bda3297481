"""What strategies look like: a letter each, a hue by what they split most, a pattern by what they compute again.

The hues are those of M. Okabe and K. Ito, "Color Universal Design" (jfly.uni-koeln.de/color), which people with any
colour vision tell apart; letters and patterns say the same without colour. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import Plan

SHADES = 4
"""Of each hue."""
_DIMENSIONS = ("tensor", "context", "expert", "spatial", "slices", "batch_degree")
HUES = ("whole", *_DIMENSIONS)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Look:
    """How a strategy is drawn.

    Attributes:
        letter: of the legend.
        fill: class of the style sheet.
        pattern: name of a pattern that lies over it; empty for none.
        strategy: short name.
        words: the same in words.
        layers: how many layers of all plans do so.
    """

    letter: str
    fill: str
    pattern: str
    strategy: str
    words: str
    layers: int


def looks_of(plans: Sequence[Plan]) -> dict[Strategy, Look]:
    """The look of every strategy of some plans, in the order in which they are met."""
    counts: dict[Strategy, int] = {}
    for strategy, count in (pair for plan in plans for pair in _runs(plan)):
        counts[strategy] = counts.get(strategy, 0) + count
    shades: dict[str, int] = {}
    found = {}
    for place, (strategy, count) in enumerate(counts.items()):
        hue = hue_of(strategy)
        shade = shades.get(hue, 0) % SHADES
        shades[hue] = shades.get(hue, 0) + 1
        fill = f"hue-{hue.removesuffix('_degree')}-{shade}"
        found[strategy] = Look(_letter(place), fill, _pattern(strategy), str(strategy), in_words(strategy), count)
    return found


def _runs(plan: Plan) -> Iterable[tuple[Strategy, int]]:
    parts = [stage.runs for stage in plan.stages] + [branch.runs for branch in plan.branches]
    yield from ((run.strategy, run.count) for runs in parts for run in runs)


def hue_of(strategy: Strategy) -> str:
    """The dimension that a strategy splits most; of equal ones the first of ``HUES``."""
    degrees = {name: int(getattr(strategy, name)) for name in _DIMENSIONS}
    most = max(degrees.values())
    return "whole" if most == 1 else next(name for name, degree in degrees.items() if degree == most)


def _pattern(strategy: Strategy) -> str:
    if strategy.offload is not Offload.NONE:
        return "dots"
    return {Recompute.NONE: "", Recompute.SELECTIVE: "sparse", Recompute.FULL: "dense"}[strategy.recompute]


def in_words(strategy: Strategy) -> str:
    """What a strategy does, as a sentence would say it."""
    zero = {1: "optimizer states", 2: "optimizer states and gradients", 3: "all states"}
    parts = [
        (strategy.data > 1, f"{strategy.data} replicas"),
        (strategy.zero > 1 or strategy.zero_stage > 0,
         f"{zero.get(strategy.zero_stage, 'states')} shared by {strategy.state_shards}"),
        (strategy.context > 1, f"tokens shared by {strategy.context}" + (" (heads exchanged)" * strategy.ulysses)),
        (strategy.expert > 1, f"experts spread {strategy.expert} ways"),
        (strategy.tensor > 1,
         f"matmuls shared by {strategy.tensor}" + (", tokens between them too" * strategy.sequence_parallel)),
        (strategy.spatial > 1, f"pixels shared by {strategy.spatial}"),
        (strategy.filters > 1, f"output channels shared by {strategy.filters}"),
        (strategy.channels > 1, f"input channels shared by {strategy.channels}"),
        (strategy.recompute is Recompute.FULL, "computed again in backward"),
        (strategy.recompute is Recompute.SELECTIVE, "what is cheap is computed again in backward"),
        (strategy.offload is not Offload.NONE, f"{strategy.offload.value} in host memory"
         if strategy.offload is not Offload.ALL else "states and activations in host memory"),
    ]  # fmt: skip
    return "; ".join(words for holds, words in parts if holds) or "nothing is split"


def _letter(place: int) -> str:
    """``A`` … ``Z``, then ``A2`` …"""
    turn, letter = divmod(place, len(_LETTERS))
    return _LETTERS[letter] + (str(turn + 1) if turn else "")
