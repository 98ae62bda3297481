"""Runs a whole file of published runs through the cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.validate.measured import measured_of
from galvatron_lite.validate.outcome import Skipped
from galvatron_lite.validate.plans import batch_of
from galvatron_lite.validate.predict import Remembered, predict_run
from galvatron_lite.validate.rows import PublishedRun
from galvatron_lite.validate.scores import Judged, judge

Progress = Callable[[int, int, str], None]


def validate_runs(
    runs: Sequence[PublishedRun], calibration: Calibration, progress: Progress | None = None
) -> list[Judged]:
    """Every run with its prediction, in order.

    Args:
        runs: what was published.
        calibration: constants.
        progress: called with (done, total, label) after each run.
    """
    memory = Remembered()
    judged = []
    for number, run in enumerate(runs, 1):
        judged.append(judge_run(run, calibration, memory))
        if progress is not None:
            progress(number, len(runs), run.family)
    return judged


def judge_run(run: PublishedRun, calibration: Calibration, memory: Remembered) -> Judged:
    """One run with its prediction; those of grade C are not predicted."""
    if run.quality == "C" and run.problem is None:
        return Judged(run, None, Skipped("grade C is not scored", "quality: 'C'."))
    outcome, batch = predict_run(run, calibration, memory), batch_of(run)
    if isinstance(outcome, Skipped):
        return Judged(run, None, outcome)
    if isinstance(batch, Skipped):
        return Judged(run, None, batch)
    return judge(run, measured_of(run, batch), outcome)
