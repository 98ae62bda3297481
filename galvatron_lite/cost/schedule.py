"""Time of one step of a pipeline: the closed form that search optimises.

Symbols: stages s = 0..p-1; m micro-batches; f_s, b_s seconds of forward and backward of one micro-batch; x_s seconds
of sending one boundary tensor from stage s to s+1, and as long for its gradient on the way back.

Every stage pays for what it sends: F_s = f_s + x_s, B_s = b_s + x_{s-1}, C_s = F_s + B_s. Then

    1F1B    T = sum_s C_s + (m - 1) max_s C_s
    GPipe   T = sum_s C_s + (m - 1) (max_s F_s + max_s B_s)

is the makespan of the event graph where sends occupy their sender: exactly for GPipe (a flow shop of equal jobs), and
for 1F1B where p = 1, where m = 1, and where all stages are alike and x = 0. It is never less than the makespan of 1F1B
where all stages have one ratio of backward to forward and all boundaries one x. (A cycle of the event graph that
advances by j micro-batches visits stage s at most once forward and once back for each, and each transfer it uses is
paid by both of its ends, so that its mean is at most max_s C_s.) Where one stage is slow forward and another one
backward, few micro-batches can take longer, but never longer than GPipe's form says (``tests/cost`` checks all this on
random pipelines).

The other schedules, with W_g the seconds that group g of p makes gradients of weights in, and C_g, W_g summed over the
v stages that a group runs:

    T = sum_g R_g + max_g (m C_g - R_g)

    1F1B                 R = C
    interleaved          R = C / v, m rounded up to a multiple of p           (Narayanan et al. 2021, section 2.2)
    zero-bubble 1p, V    R = C - (1 + min(1, (m - 1) / (p - 1))) W            (Qi et al. 2023, table 2: ZB-H1)
    zero-bubble 2p       R = C - (1 + min(2, (m - 1) / (p - 1))) W            (the same: ZB-H2)

R is what one more group delays the step by. Where zero-bubble steps follow one another without waiting for all groups,
T is the span of the busiest group, as in ``cost.zero_bubble``. Where they wait, 2p gains nothing over 1p: what it saves
on the way back it pays for by starting later, so it has the form of 1p. On equal stages without sends T equals the
simulation for interleaved, and for zero-bubble where the gradients of input and weights take a forward each; elsewhere
the two differ by what the greedy order of the simulation makes of it (``tests/cost``). ZB-V is given the bubble of
ZB-H1, at half its memory: its bubble has no closed form where passes are unlike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.parallelism.pipeline.schedule import group_of
from galvatron_lite.parallelism.pipeline.times import StageTimes
from galvatron_lite.plans.schema import Schedule

Figure = TypeVar("Figure", float, int, NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class Form:
    """The closed form of a schedule, over parts c_1..c_K of the time of one micro-batch on each group of devices:

    T = sum_k (ramp_k sum_g c_gk + rounds_k max_g c_gk)
    """

    microbatches: int  # a step, rounded up to whole rounds
    ramp: tuple[float, ...]  # ramp, rounds: per part
    rounds: tuple[float, ...]
    freed: float = 0.0  # how much of W leaves R; 0 where backward is not split
    apart: bool = False  # whether forward and backward count apart (GPipe)

    def parts(self, forward: Figure, backward: Figure, saved: Figure) -> tuple[Figure, ...]:
        """The parts of a group, a stage or a layer; they add up over layers.

        Args:
            forward, backward: time of one micro-batch, backward with the gradients of weights.
            saved: ``freed`` times that of the gradients of weights.
        """
        if self.apart:
            return forward, backward
        both = forward + backward
        if self.freed == 0.0:
            return (both,)
        return both - saved, (self.microbatches - 1) * both + saved

    @property
    def share(self) -> float:
        """What of a stage's time (less what is freed) delays the step where the stage is not the slowest."""
        return self.ramp[0]

    @property
    def alone(self) -> tuple[float, ...]:
        """Per part, how often it counts for a group that is the slowest."""
        return tuple(ramp + rounds for ramp, rounds in zip(self.ramp, self.rounds, strict=True))


def form_of(
    schedule: Schedule, groups: int, microbatches: int, virtual: int = 1, *, steps_overlap: bool = False
) -> Form:
    """The closed form of a schedule on so many groups of devices with so many stages each; see the module."""
    rounds = microbatches - 1
    if schedule is Schedule.GPIPE:
        return Form(microbatches, (1, 1), (rounds, rounds), apart=True)
    if schedule.whole_rounds:
        padded = -(-microbatches // groups) * groups
        return Form(padded, (1 / virtual,), (padded - 1 / virtual,))
    if schedule.splits_backward:
        most = 2.0 if schedule is Schedule.ZERO_BUBBLE_2P and steps_overlap else 1.0
        return Form(microbatches, (1, 0), (0, 1), 1.0 + min(most, rounds / max(groups - 1, 1)))
    return Form(microbatches, (1,), (rounds,))


def closed_form(
    stages: Sequence[StageTimes],
    microbatches: int,
    schedule: Schedule,
    virtual: int = 1,
    *,
    steps_overlap: bool = False,
) -> float:
    """Seconds from the first forward to the last backward, or of the busiest group's span; see the module.

    Args:
        stages: in the order of the model, ``virtual`` for each group of devices.
        microbatches: a step.
        schedule: order of passes.
        virtual: stages of each group.
        steps_overlap: see ``Profile``.
    """
    groups = len(stages) // virtual
    form = form_of(schedule, groups, microbatches, virtual, steps_overlap=steps_overlap)
    totals = [[0.0] * len(form.ramp) for _ in range(groups)]
    for index, stage in enumerate(stages):
        own = totals[group_of(schedule, groups, index)]
        for part, value in enumerate(form.parts(stage.forward_total, stage.backward_total, form.freed * stage.weight)):
            own[part] += value
    by_part = zip(form.ramp, form.rounds, zip(*totals, strict=True), strict=True)
    return sum((ramp * sum(values) + rounds * max(values) for ramp, rounds, values in by_part), 0.0)
