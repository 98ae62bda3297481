"""A plan under the names of the model that it is run on: published shapes name layers otherwise than modules do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer
from galvatron_lite.plans.schema import Plan

SHARED = frozenset({"before", "after"})
"""Names that layers of all models have."""


def named_for(plan: Plan, layers: Sequence[Layer]) -> Plan:
    """The plan with its layers called as the model's, which are taken in order; itself where it knows them.

    A layer between an encoder and a decoder may be several of the model's.
    """
    names, start = [layer.name for layer in layers], 0
    runs = [run for stage in plan.stages for run in stage.runs]
    ends = [name for run in runs for name in (run.first, run.last)]
    strange = [name for name in ends if name not in names]
    counts = [run.count for run in runs]
    sizes = _sizes(counts, names)
    if not strange and sizes == counts:
        return plan
    if strange and len(strange) * 2 < len([name for name in ends if name not in SHARED]):
        raise InputError("plan: layer", strange[0], f"The model has no such layer. {_layer_list(names)}")
    if sum(sizes) != len(names):
        remedy = f"The plan is for {sum(sizes)} layers, the model has {len(names)}: give the model it was made for."
        raise InputError("plan", plan.model, remedy)
    stages, left = [], iter(sizes)
    for stage in plan.stages:
        own = []
        for run, size in zip(stage.runs, left, strict=False):
            own.append(replace(run, first=names[start], last=names[start + size - 1], count=size))
            start += size
        stages.append(replace(stage, runs=tuple(own)))
    return replace(plan, stages=tuple(stages))


def _sizes(counts: Sequence[int], names: Sequence[str]) -> list[int]:
    """Layers of the model that each run of so many planned ones stands for.

    If the model has more of them, and those without a number lie together between the repeated ones (encoder and
    decoder), then the plan has one in their stead.
    """
    more = len(names) - sum(counts)
    between = [
        place for place, name in enumerate(names) if not name.rpartition(".")[2].isdigit() and name not in SHARED
    ]
    if more <= 0 or between != list(range(min(between, default=0), min(between, default=0) + more + 1)):
        return list(counts)
    ends = accumulate(counts)
    return [count + more * (0 <= between[0] - end + count < count) for count, end in zip(counts, ends, strict=True)]


def _layer_list(names: Sequence[str]) -> str:
    shown = list(names) if len(names) <= 12 else [*names[:6], "...", *names[-5:]]
    return f"Its layers are: {', '.join(shown)}."
