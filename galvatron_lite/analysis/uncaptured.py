"""Plans of models that cannot be captured, as the values of tensors decide what they run: every rank runs all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.model.graph import Layer, Recompute, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import DEFAULT_SCHEDULE, PLAN_VERSION, LayerRun, Plan, Stage
from galvatron_lite.search.pins import dimensions_named, pin_named
from galvatron_lite.units import format_bytes

STATES = 2  # tensors that an Adam keeps of each parameter, beside it and its gradient
LARGE = 0.5  # share of the budget beyond which states are shared and activations computed again


def uncaptured_plan(
    model: str,
    layers: Sequence[Layer],
    *,
    size: int,
    devices: int,
    batch: int,
    budget: int,
    precision: str,
    fix: Sequence[str] = (),
    forbid: Sequence[str] = (),
) -> Plan:
    """Data parallelism; where states are large for the budget, or it is pinned, with ZeRO-1 and full recomputation.

    Ranks may run unlike layers for unlike samples, so nothing that ranks do together may happen inside the model. No
    costs are known, and memory of activations is not.
    """
    pins: dict[str, Any] = dict(_pin(words) for words in fix)
    forbidden = {name for words in forbid for name in dimensions_named(words)}
    large = (2 + STATES) * size > LARGE * budget
    zero = pins.get("zero_stage", int(large and "zero" not in forbidden))
    recompute = pins.get("recompute", Recompute.FULL if large and "recompute" not in forbidden else Recompute.NONE)
    allowed: dict[str, set[Any]] = {
        "batch_degree": {devices}, "zero_stage": {0, 1} if devices > 1 else {0}, "pipeline": {1},
        "microbatches": set(range(1, batch // devices + 1)), "recompute": {Recompute.NONE, Recompute.FULL},
    }  # fmt: skip
    for name, value in pins.items():
        if value not in allowed.get(name, {1}):
            remedy = (
                "Values of tensors decide what the model runs, so it is not known beforehand what a device would do. "
                f"It trains with dp={devices}, ZeRO 0 or 1, recompute none or full, and micro-batches."
            )
            raise InputError(f"--fix {name}", value, remedy)
    shared = devices > 1 and zero == 1
    least = 2 * size + STATES * size // (devices if shared else 1)
    if shared and precision != "fp32":  # weights in 16 bits, and masters of shares
        least = size + size // 2 + (STATES + 1) * size // devices
    if least > budget:
        raise InfeasibleError(
            f"{model} takes {format_bytes(least)} a device for parameters, gradients and states alone: values of "
            "tensors decide what it runs, so every device holds all parameters.",
            least,
        )
    edge = Strategy(zero=devices, zero_stage=1) if shared else Strategy(data=devices)
    block = Strategy(edge.data, edge.zero, edge.zero_stage, recompute=recompute)
    runs = (LayerRun(layer.name, layer.name, 1, block if layer.role is Role.BLOCK else edge) for layer in layers)
    count = pins.get("microbatches", 1)
    return Plan(
        PLAN_VERSION, model, devices, batch, count, DEFAULT_SCHEDULE, precision, (Stage(tuple(runs)),)
    )  # fmt: skip


def check_uncaptured(plan: Plan, reason: InputError) -> None:
    """Refuse a plan under which ranks do something together inside the model."""
    for stage in plan.stages:
        for run in stage.runs:
            one = run.strategy
            if len(plan.stages) > 1 or plan.branches or one.zero_stage > 1 or one.devices != one.batch_degree:
                remedy = f"Only dp, ZeRO 1 and full recomputation run such a model: {reason.remedy}"
                raise InputError("plan", f"{run.first}: {one}, {len(plan.stages)} stages", remedy)


def _pin(words: str) -> tuple[str, object]:
    name, _, text = words.partition("=")
    pin = pin_named(name)
    return pin.field, pin.read(pin.name, text)
