"""From the records of a run to what a step's time went to on each rank. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from galvatron_lite.diagnose.times import RankTimes, Where
from galvatron_lite.runs.read import Run
from galvatron_lite.runs.schema import Part, RankRecord


def times_logged(run: Run) -> list[RankTimes]:
    """What a run's log tells of each rank, under the plan that was last in force.

    Forward passes of blocks are told apart, each of them with its communication; backward is one figure.
    """
    passes = run.plan.microbatches
    return [_of_rank(records, passes) for records in run.ranks if records]


def _of_rank(records: Sequence[RankRecord], passes: int) -> RankTimes:
    known = [record for record in records if record.steps]

    def mean(figure: Callable[[RankRecord], float]) -> float:
        """Median over records: a slow moment of the machine is not the run."""
        return median(figure(record) for record in known) if known else 0.0

    seconds = {part: mean(lambda record, part=part: record.parts.get(part, 0.0)) for part in Part}  # type: ignore[misc]
    names = dict.fromkeys(name for record in known for name in record.layers)
    layers = {
        name: passes * median(record.layers[name] for record in known if name in record.layers) for name in names
    }  # fmt: skip
    blocks = sum(layers.values())
    forward = {**layers, "": max(seconds[Part.FORWARD] - blocks, 0.0)} if layers else {"": seconds[Part.FORWARD]}
    communication = {
        (Where.GRADIENTS, ""): seconds[Part.GRADIENTS],
        (Where.CHECK, ""): seconds[Part.CHECK],
    }
    whole = mean(lambda record: record.seconds)
    parted = any(record.parts.keys() - {Part.OTHER} for record in known)
    backward = {"": seconds[Part.BACKWARD] + seconds[Part.WEIGHT]}
    return RankTimes(
        records[0].rank, whole, sum(record.steps for record in known), forward, backward,
        {key: own for key, own in communication.items() if own}, seconds[Part.OPTIMIZER], seconds[Part.WAITING],
        seconds[Part.OTHER], mean(lambda record: record.between), layered=bool(layers), parted=parted,
    )  # fmt: skip
