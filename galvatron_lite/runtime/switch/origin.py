"""What a model was before it was split: what is needed to split it in another way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from galvatron_lite.model.graph import Layer
from galvatron_lite.parallelism.precision import compute_dtype
from galvatron_lite.parallelism.process_groups import ProcessGroups
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.parallelize import Prepared, SetupOptions, prepare
from galvatron_lite.runtime.placement import place_layers
from galvatron_lite.runtime.switch.structure import Structure

EXAMINED = 8
"""Plans of which it is kept what splitting the model by them needs to know."""


@dataclass(slots=True)
class OriginalModel:
    """A model before it was split."""

    model: nn.Module  # the user's, which is split in place
    layers: Sequence[Layer]  # of the model
    batch: Any  # an example
    options: SetupOptions  # how it was set up
    precision: str | None  # of compute, whatever plans say; None: as each plan says
    whole: Structure  # its modules before, without values
    split: Structure | None = None  # its modules right after they were split last; None before
    # how layers can be split, as far as it was found out
    tensor_plans: dict[str, TensorPlan] = field(default_factory=dict)
    examined: dict[object, Prepared] = field(default_factory=dict)  # what is known of the last plans, by their stages

    def settle(self) -> None:
        """The model was split: what differs later, the user changed."""
        self.split = Structure(self.model.modules())

    def everything(self) -> Structure:
        """All modules, those that only the whole model has too, as they are now."""
        modules = {id(one): one for one in (*self.whole.modules, *self.model.modules())}
        return Structure(modules.values())

    def options_of(self, plan: Plan, groups: ProcessGroups) -> SetupOptions:
        """How the model is set up under another plan."""
        return replace(self.options, compute=compute_dtype(self.precision or plan.precision), groups=groups)

    def prepare(self, plan: Plan, options: SetupOptions, batch: Any, rank: int) -> Prepared:
        """What splitting the whole model by a plan needs to know; found out once for each of the last few splits.

        Args:
            plan: for the model.
            options: under it.
            batch: an example.
            rank: of this process.

        Raises:
            InputError: the plan does not fit the model.
        """
        if batch is not self.batch:
            self.examined.clear()
        key = plan.schedule, plan.virtual_stages, tuple(stage.runs for stage in plan.stages)
        known = self.examined.pop(key, None)
        if known is None:
            if self.options.tensor_plans is None:
                options = replace(options, tensor_plans=self._tensor_plans_for(plan))
            known = prepare(self.model, plan, self.layers, batch, rank // plan.stage_devices, options)
            self.tensor_plans.update(known.splits.tensor)
        self.examined[key] = known
        while len(self.examined) > EXAMINED:
            del self.examined[next(iter(self.examined))]
        return replace(known, plan=plan)

    def _tensor_plans_for(self, plan: Plan) -> Mapping[str, TensorPlan] | None:
        placed = [one for stage in place_layers(plan, self.layers) for one in stage]
        wanted = {one.layer.name for one in placed if one.strategy.tensor > 1}
        return self.tensor_plans if wanted <= self.tensor_plans.keys() else None


def origin_of(
    model: nn.Module, layers: Sequence[Layer], batch: Any, options: SetupOptions, precision: str | None
) -> OriginalModel:
    """What a model is; call it before the model is split."""
    return OriginalModel(model, layers, batch, options, precision, Structure(model.modules(), hollow=True))
