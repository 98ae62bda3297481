"""What tensor parallelism does with the experts of a block's mixtures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from galvatron_lite.parallelism.expert.slices import find_slices
from galvatron_lite.parallelism.tensor.infer_probe import ProbeError, find_hidden, routed_experts
from galvatron_lite.parallelism.tensor.regions import ExpertSlices, TensorPlan


def find_expert_slices(
    block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[ExpertSlices, ...] | str:
    """How the experts of a block are sliced, none where it has none, or why they cannot be.

    Args:
        block: on any device; not changed.
        args: positional inputs it was called with.
        kwargs: keyword inputs it was called with.
    """
    mixtures = routed_experts(block)
    if not mixtures:
        return ()
    try:
        hidden = find_hidden(args, kwargs).shape[-1]
    except ProbeError as error:
        return f"The block could not be examined: {error.why}"
    with torch.device("cpu"), torch.inference_mode(False):
        found = [find_slices(block, mixture, hidden) for mixture in mixtures]
    reasons = [one for one in found if isinstance(one, str)]
    return "; ".join(reasons) if reasons else tuple(one for one in found if not isinstance(one, str))


def with_experts(plan: TensorPlan, experts: tuple[ExpertSlices, ...]) -> TensorPlan:
    """The plan of a block's other layers with its experts sliced as many ways."""
    if not experts or plan.max_degree == 1:
        return plan
    degree = math.gcd(plan.max_degree, *(one.max_degree for one in experts))
    if degree == 1:
        extents = ", ".join(f"{one.path} {one.max_degree}" for one in experts)
        return TensorPlan(reason=f"Its experts can be sliced by divisors of other numbers ({extents}) than the rest")
    return replace(plan, experts=experts, max_degree=degree)
