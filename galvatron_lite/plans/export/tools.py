"""The tools that plans are written for, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from galvatron_lite.errors import InputError, unknown
from galvatron_lite.plans.export import accelerate, deepspeed, megatron, torchtitan
from galvatron_lite.plans.export.common import Exported
from galvatron_lite.plans.io import check_plan
from galvatron_lite.plans.schema import Plan

TOOLS: Mapping[str, Callable[[Plan], Exported]] = {
    module.TOOL: module.exported for module in (deepspeed, megatron, torchtitan, accelerate)
} | {"nemo": megatron.nemo}


def export(plan: Plan, tool: str, *, strict: bool = False) -> Exported:
    """A plan in a tool's words; the same plan gives the same text.

    Raises:
        InputError: no such tool, a plan that contradicts itself, or (strict) something that the tool's file cannot say.
    """
    if tool not in TOOLS:
        raise unknown("--to", tool, TOOLS)
    made = TOOLS[tool](check_plan(plan))
    if strict and made.left_out:
        more = f" (and {len(made.left_out) - 1} more)" if len(made.left_out) > 1 else ""
        remedy = f"{tool} cannot be told of it{more}: leave --strict out, or plan without it (--fix, --forbid)."
        raise InputError("--strict", made.left_out[0], remedy)
    return made
