"""What a plan uses, by name: to see that samples of plans leave no dimension out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan, Schedule
from tests.schedules import ZERO_BUBBLE

OF_LAYERS: Mapping[str, Callable[[Strategy], bool]] = {
    "data": lambda s: s.data > 1,
    "zero 1": lambda s: s.zero_stage == 1,
    "zero 2": lambda s: s.zero_stage == 2,
    "zero 3": lambda s: s.zero_stage == 3,
    "data and zero": lambda s: s.data > 1 and s.zero > 1,
    "tensor": lambda s: s.tensor > 1 and not s.sequence_parallel,
    "sequence": lambda s: s.sequence_parallel,
    "zero and tensor": lambda s: s.zero > 1 and s.tensor > 1,
    "context": lambda s: s.context > 1 and not s.ulysses,
    "ulysses": lambda s: s.ulysses,
    "expert": lambda s: s.expert > 1,
    "selective": lambda s: s.recompute is Recompute.SELECTIVE,
    "full": lambda s: s.recompute is Recompute.FULL,
    "offload states": lambda s: s.offloads_states,
    "offload activations": lambda s: s.offloads_activations,
    "spatial": lambda s: s.spatial > 1,
    "filters": lambda s: s.filters > 1,
    "channels": lambda s: s.channels > 1,
}
OF_PLANS: Mapping[str, Callable[[Plan], bool]] = {
    "unlike layers": lambda plan: len({run.strategy for stage in plan.stages for run in stage.runs}) > 2,
    "unequal stages": lambda plan: len({len(stage.runs) for stage in plan.stages}) > 1,
    "four stages": lambda plan: len(plan.stages) == 4,
    "micro-batches": lambda plan: plan.microbatches > 1,
    "fewer micro-batches than stages": lambda plan: plan.microbatches < len(plan.stages),
    "1f1b": lambda plan: len(plan.stages) > 1 and plan.schedule is Schedule.ONE_F_ONE_B,
    "gpipe": lambda plan: plan.schedule is Schedule.GPIPE,
    "interleaved": lambda plan: plan.schedule is Schedule.INTERLEAVED,
    "zero-bubble": lambda plan: plan.schedule in ZERO_BUBBLE,
}


def features(plan: Plan) -> set[str]:
    """The names of what is used in a plan, in any layer."""
    strategies = [run.strategy for stage in plan.stages for run in stage.runs]
    found = {name for name, used in OF_LAYERS.items() if any(used(one) for one in strategies)}
    return found | {name for name, used in OF_PLANS.items() if used(plan)}


def counts(plans: Iterable[Plan]) -> dict[str, int]:
    """How many plans use what, 0 included."""
    found = Counter(name for plan in plans for name in features(plan))
    return {name: found[name] for name in (*OF_LAYERS, *OF_PLANS)}
