"""What a step takes by a zero-bubble schedule, and what it holds.

The order of passes is that of ``parallelism.pipeline.zero_bubble``, which the runtime follows. Where software does
without the optimizer's global synchronisation (Qi et al. 2023, section 4, post-validation), steps follow one another
like parallelograms, so a step takes what the busiest group needs from its first pass to its last, not the makespan.
"""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_lite.cost.simulation import busiest
from galvatron_lite.parallelism.pipeline.schedule import Action, Course
from galvatron_lite.parallelism.pipeline.times import PassOrder
from galvatron_lite.parallelism.pipeline.zero_bubble import shown_of, shown_rounds


@dataclass(frozen=True, slots=True)
class ZeroBubbleStep:
    """One step."""

    spans: tuple[float, ...]  # seconds from each group's first pass to its last
    ends: tuple[float, ...]  # seconds from the step's beginning to each group's last pass
    actions: tuple[tuple[Action, ...], ...]  # of each group, in order, as far as they are simulated (``shown_of``)


def run_zero_bubble(order: PassOrder, course: Course) -> ZeroBubbleStep:
    """Spans and memory of a step.

    Args:
        order: seconds of every stage's passes, and what else decides their order.
        course: of the pipeline.
    """
    groups = shown_rounds(order, course)
    more = (course.microbatches - shown_of(course).microbatches) * busiest(order.stages, course, order.hidden)
    return ZeroBubbleStep(
        tuple(group.span + more for group in groups),
        tuple(group.starts[0] + group.span + more for group in groups),
        tuple(group.actions for group in groups),
    )
