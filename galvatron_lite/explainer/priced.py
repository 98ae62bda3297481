"""A plan in stages with all that its price is made of, for those who take it apart. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from galvatron_lite.cost.groups import busy_seconds, groups_of, price_stages
from galvatron_lite.cost.layer import ALONE, LayerPricer, Sharing
from galvatron_lite.cost.sharing import sharing_of
from galvatron_lite.cost.stage import Shape, StageCost
from galvatron_lite.cost.step import price_staged, shape_of, strategies_of
from galvatron_lite.parallelism.pipeline.schedule import group_of, stage_at
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan, Prediction


def explained_in_parts(plan: Plan) -> bool:
    """Whether a plan is one of stages in the model's order, the only kind whose price is taken apart."""
    return not plan.branches and plan.cyclic is None


@dataclass(frozen=True)
class Priced:
    """A plan in stages and its price.

    Attributes:
        pricer: of the profile, in the plan's mode.
        plan: with its prediction.
        prediction: the plan's.
        strategies: of every layer of the model.
        shape: what the plan chooses once.
        stages: the cost of each, in the order of the model.
    """

    pricer: LayerPricer
    plan: Plan
    prediction: Prediction
    strategies: tuple[Strategy, ...]
    shape: Shape
    stages: tuple[StageCost, ...]

    @cached_property
    def groups(self) -> list[list[StageCost]]:
        """The stages that each group of devices runs."""
        return groups_of(self.shape, self.stages)

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """Places in the model of the layers of each stage."""
        ends = list(accumulate(sum(run.count for run in stage.runs) for stage in self.plan.stages))
        return tuple(range(start, end) for start, end in zip([0, *ends], ends, strict=False))

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """Seconds from the step's beginning to the end of each group's last backward."""
        return busy_seconds(self.pricer.profile, self.shape, self.stages)

    @cached_property
    def busiest(self) -> int:
        """Number of the group of devices that works longest, whose time ``TimeBreakdown`` is of."""

        def work(group: int) -> tuple[float, float]:
            own = self.groups[group]
            return sum(cost.times.total for cost in own), sum(cost.step for cost in own)

        return max(range(self.shape.stages), key=work)

    def stages_of(self, group: int) -> tuple[int, ...]:
        """Numbers of the stages that a group of devices runs, in the order of its chunks."""
        return tuple(
            stage_at(self.shape.schedule, self.shape.stages, group, chunk) for chunk in range(self.shape.virtual)
        )

    def group_of(self, stage: int) -> int:
        """Number of the group of devices that runs a stage."""
        return group_of(self.shape.schedule, self.shape.stages, stage)

    def pricer_of(self, stage: int) -> LayerPricer:
        """The pricer of a stage's devices."""
        return self.pricer.of_group(self.shape.stage_devices, self.group_of(stage))

    def sharing_at(self, stage: int) -> dict[int, Sharing]:
        """What sharing parameters means for the layers of a stage, by place; absent: nothing."""
        beside = {place for own in self.stages_of(self.group_of(stage)) for place in self.ranges[own]}
        return sharing_of(self.pricer.profile.graph, beside)

    def sharing_of_layer(self, stage: int, place: int) -> Sharing:
        """The same of one layer."""
        return self.sharing_at(stage).get(place, ALONE)


def taken_apart(pricer: LayerPricer, plan: Plan) -> Priced:
    """A plan in stages, priced.

    Raises:
        InputError: the plan does not fit the profile's model, or its numbers do not divide.
    """
    done = price_staged(pricer, plan)
    strategies = tuple(strategies_of(plan, pricer.profile))
    shape = shape_of(plan, strategies)
    sizes = [sum(run.count for run in stage.runs) for stage in plan.stages]
    stages = tuple(price_stages(pricer, shape, sizes, strategies))
    assert done.prediction is not None
    return Priced(pricer, done, done.prediction, strategies, shape, stages)
