"""Ranks that work together, against a grid of all ranks of a stage."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.parallelism.axes import RankLine
from galvatron_lite.parallelism.lines import lines_of
from galvatron_lite.parallelism.strategy import DEGREES, Strategy

SIDES, SLICES = {"depth", "height", "width"}, {"tensor", "filters", "channels"}
STATES = {"zero", "context", *SIDES}


def on_grid(strategy: Strategy, free: set[str]) -> list[tuple[int, ...]]:
    """Ranks that differ in these degrees only, by rank."""
    places = list(product(*(range(getattr(strategy, name)) for name in DEGREES)))
    fixed = [tuple(at for at, name in zip(place, DEGREES, strict=True) if name not in free) for place in places]
    return [tuple(rank for rank, one in enumerate(fixed) if one == own) for own in fixed]


def agree(line: RankLine, wanted: list[tuple[int, ...]]) -> bool:
    ranks = range(len(wanted))
    return (
        [line.through(rank) for rank in ranks] == wanted
        and [line.index(rank) for rank in ranks] == [members.index(rank) for rank, members in enumerate(wanted)]
        and list(line.groups(len(wanted))) == sorted(set(wanted))
    )


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(DEGREES), st.sampled_from([2, 3]), max_size=4), st.integers(0, 3))
def test_lines_are_those_of_the_grid(degrees: dict[str, int], stage: int) -> None:
    strategy = Strategy(**degrees, zero_stage=stage)
    lines, sharded = lines_of(strategy), strategy.zero > 1 or stage > 0
    expected = [
        (lines.batch, {"data", "zero"}), (lines.weights, SLICES), (lines.matmuls, {"tensor"}),
        (lines.channels, {"filters", "channels"}), (lines.tokens, {"context"}), (lines.planes, {"depth"}),
        (lines.rows, {"height"}), (lines.columns, {"width"}), (lines.stage, set(DEGREES)),
        (lines.everyone, set(DEGREES)), (lines.states.gradients, set(DEGREES) - SLICES),
        (lines.states.shards, STATES if sharded else set()),
        (lines.states.replicas, {"data"} if sharded and strategy.state_shards > 1 else set()),
    ]  # fmt: skip
    assert [place for place, (line, free) in enumerate(expected) if not agree(line, on_grid(strategy, free))] == []
    assert lines.spread is None


def test_experts_lie_above_the_slices_and_their_shards_above_them() -> None:
    """Sixteen ranks: slices, then experts, then those that share states, then replicas."""
    lines = lines_of(Strategy(data=2, zero=4, zero_stage=3, tensor=2, expert=2))
    assert lines.spread is not None
    assert lines.spread.over is not None
    assert lines.spread.over.through(5) == (5, 7)
    assert (lines.spread.shards.through(5), lines.spread.replicas.through(5)) == ((1, 5), (5, 13))
    assert lines.spread.gradients.through(5) == (1, 5, 9, 13)
