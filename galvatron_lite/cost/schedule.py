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
T is the span of the busiest group, as in ``cost.simulation``. Where they wait, 2p gains nothing over 1p: what it saves
on the way back it pays for by starting later, so it has the form of 1p. On equal stages without sends T equals the
simulation for interleaved, and for zero-bubble where the gradients of input and weights take a forward each; elsewhere
the two differ by what the greedy order of the simulation makes of it (``tests/cost``). ZB-V is given the bubble of
ZB-H1, at half its memory: its bubble has no closed form where passes are unlike.
"""

from __future__ import annotations

from collections.abc import Sequence

from galvatron_lite.parallelism.pipeline.schedule import Figure, Form, Schedule, group_of
from galvatron_lite.parallelism.pipeline.times import StageTimes

__all__ = ["Figure", "Form", "closed_form", "form_of"]


def form_of(
    schedule: Schedule, groups: int, microbatches: int, virtual: int = 1, *, steps_overlap: bool = False
) -> Form:
    """The closed form of a schedule on so many groups of devices with so many stages each; see the module."""
    return schedule.form(groups, microbatches, virtual, steps_overlap=steps_overlap)


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
    form = schedule.form(groups, microbatches, virtual, steps_overlap=steps_overlap)
    totals = [[0.0] * len(form.ramp) for _ in range(groups)]
    for index, stage in enumerate(stages):
        own = totals[group_of(schedule, groups, index)]
        for part, value in enumerate(form.parts(stage.forward_total, stage.backward_total, form.freed * stage.weight)):
            own[part] += value
    by_part = zip(form.ramp, form.rounds, zip(*totals, strict=True), strict=True)
    return sum((ramp * sum(values) + rounds * max(values) for ramp, rounds, values in by_part), 0.0)
