"""Plans for models that cannot be captured, because values of tensors decide what they run.

Ranks may run different layers for different samples, so they must not communicate inside the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.model.graph import Layer, Recompute, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import DEFAULT_SCHEDULE, PLAN_VERSION, LayerRun, Plan, Stage
from galvatron_lite.search.pin_names import dimensions_named, pin_named
from galvatron_lite.units import format_bytes

STATES = 2  # tensors that Adam keeps for each parameter
LARGE = 0.5  # share of the budget from which states are sharded and activations recomputed


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
    """Return a plan of data parallelism; with ZeRO-1 and full recomputation if states are large or it is pinned.

    Args:
        model: name of the model.
        layers: of the model.
        size: bytes of all parameters.
        devices: number of devices.
        batch: samples a step.
        budget: bytes a device. Memory of activations is not known, and not counted.
        precision: of compute.
        fix: pins, as for ``galvatron plan --fix``.
        forbid: excluded dimensions, as for ``galvatron plan --forbid``.

    Raises:
        InputError: a pin that such a model cannot be trained with.
        InfeasibleError: parameters, gradients and states do not fit the budget.
    """
    pins: dict[str, Any] = {}
    for words in fix:
        name, _, text = words.partition("=")
        pin = pin_named(name)
        pins[pin.field] = pin.read(pin.name, text)
    forbidden = {name for words in forbid for name in dimensions_named(words)}
    large = (2 + STATES) * size > LARGE * budget
    zero = pins.get("zero_stage", int(large and "zero" not in forbidden))
    recompute = pins.get("recompute", Recompute.FULL if large and "recompute" not in forbidden else Recompute.NONE)
    _check_pins(pins, devices, batch)
    sharded = devices > 1 and zero == 1
    least = 2 * size + STATES * size // (devices if sharded else 1)
    if sharded and precision != "fp32":  # weights in 16 bits, and sharded master weights
        least = size + size // 2 + (STATES + 1) * size // devices
    if least > budget:
        raise InfeasibleError(
            f"{model} takes {format_bytes(least)} a device for parameters, gradients and states alone: values of "
            "tensors decide what it runs, so every device holds all parameters.",
            least,
        )
    edge = Strategy(zero=devices, zero_stage=1) if sharded else Strategy(data=devices)
    block = Strategy(edge.data, edge.zero, edge.zero_stage, recompute=recompute)
    runs = (LayerRun(layer.name, layer.name, 1, block if layer.role is Role.BLOCK else edge) for layer in layers)
    count = pins.get("microbatches", 1)
    return Plan(PLAN_VERSION, model, devices, batch, count, DEFAULT_SCHEDULE, precision, (Stage(tuple(runs)),))


def _check_pins(pins: dict[str, Any], devices: int, batch: int) -> None:
    allowed: dict[str, set[Any]] = {
        "batch_degree": {devices},
        "zero_stage": {0, 1} if devices > 1 else {0},
        "pipeline": {1},
        "microbatches": set(range(1, batch // devices + 1)),
        "recompute": {Recompute.NONE, Recompute.FULL},
    }
    for name, value in pins.items():
        if value not in allowed.get(name, {1}):
            remedy = (
                "Values of tensors decide what the model runs, so it is not known beforehand what a device would do. "
                f"It trains with dp={devices}, ZeRO 0 or 1, recompute none or full, and micro-batches."
            )
            raise InputError(f"--fix {name}", value, remedy)


def check_uncaptured(plan: Plan, reason: InputError) -> None:
    """Refuse a plan under which ranks communicate inside the model; ``reason``: why it cannot be captured."""
    for stage in plan.stages:
        for run in stage.runs:
            strategy = run.strategy
            split = strategy.devices != strategy.batch_degree or strategy.zero_stage > 1
            if len(plan.stages) > 1 or plan.branches or split:
                remedy = f"Only dp, ZeRO 1 and full recomputation run such a model: {reason.remedy}"
                raise InputError("plan", f"{run.first}: {strategy}, {len(plan.stages)} stages", remedy)
