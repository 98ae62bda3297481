"""Write plans as settings of other software, and read settings as plans, by the name of ``--for``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import read_text
from galvatron_lite.model.graph import ModelGraph, Recompute
from galvatron_lite.parallelism.backends import target_named
from galvatron_lite.plans.export.deepspeed import ACCELERATE, DEEPSPEED
from galvatron_lite.plans.export.fields import Reading, Tool, commented, read, write
from galvatron_lite.plans.export.megatron import MEGATRON, NEMO
from galvatron_lite.plans.export.settings import Settings, World, plan_from, settings_of, simplified
from galvatron_lite.plans.export.torchtitan import TORCHTITAN
from galvatron_lite.plans.io import check_plan
from galvatron_lite.plans.schema import Plan
from galvatron_lite.units import ITEM_BYTES

TOOLS: Mapping[str, Tool] = {tool.name: tool for tool in (DEEPSPEED, MEGATRON, TORCHTITAN, ACCELERATE, NEMO)}
_FILE_BYTES = 2**20
_NAMES = {"zero_stage": "ZeRO stage", "data": "replicas of shards", "zero": "shards", "virtual": "virtual stages"}


@dataclass(frozen=True, slots=True)
class Exported:
    """A plan as a settings file."""

    tool: str  # name of the software
    text: str  # content of the file
    left_out: tuple[str, ...]  # what of the plan the file does not express, a line each
    by_hand: tuple[str, ...]  # what the user's own code must do, a line each


def export(plan: Plan, tool: str, *, strict: bool = False) -> Exported:
    """Write a plan as settings of other software; the same plan gives the same text.

    Args:
        plan: the plan.
        tool: name of the software.
        strict: refuse a plan that the settings cannot fully express.

    Raises:
        InputError: an unknown name, a plan that contradicts itself, or (strict) one that cannot be expressed.
    """
    target_named(tool)
    target, settings = TOOLS[tool], settings_of(check_plan(plan))
    if settings.precision not in ITEM_BYTES:
        raise InputError("precision", settings.precision, f"Choose one of {', '.join(ITEM_BYTES)}.")
    stack = "" if plan.provenance is None else plan.provenance.stack
    priced = stack == target_named(tool).stack
    body = target.dump(write(target, settings, priced=priced))
    by_hand = tuple(target.by_hand(settings))
    left_out = (*simplified(plan, settings), *_not_expressed(target, settings, commented(by_hand) + body))
    if settings.strategy.recompute is Recompute.SELECTIVE and not priced:
        left_out += (f"what is computed again selectively: {target.software} has a list of its own",)
    if strict and left_out:
        more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        remedy = f"{tool} cannot be told of it{more}: leave --strict out, or plan for it: galvatron plan --for {tool}."
        raise InputError("--strict", left_out[0], remedy)
    title = f"{plan.model} on {plan.devices} devices, batch {plan.global_batch}, for {target.software}"
    head = commented([title, *(f"not expressed here: {line}" for line in left_out), *by_hand])
    return Exported(tool, head + body if target.comments else body, left_out, by_hand)


def _not_expressed(target: Tool, settings: Settings, text: str) -> Iterator[str]:
    """Read a settings file again, and list where it differs from the settings that it was written from."""
    main, error = settings.strategy, None
    for devices in (settings.devices, main.batch_degree * main.tensor):
        try:
            world = World("", devices, settings.blocks, settings.batch)
            read_choices = read(target, target.parse(text, ""), world).settings.choices()
            break
        except InputError as refused:
            error = refused
    else:
        assert error is not None
        yield f"{error.field.removeprefix(', ')} {error.value}"
        return
    for name, value in settings.choices().items():
        if read_choices[name] != value:
            hint = f"; {target.hints[name]}" if name in target.hints else ""
            words = _NAMES.get(name, name.replace("_", " "))
            instead = getattr(read_choices[name], "value", read_choices[name])
            instead = "not set" if instead in (None, "") else instead
            yield f"{words} {getattr(value, 'value', value)} (these settings: {instead}){hint}"


def read_settings(
    path: Path, tool: str, graph: ModelGraph, devices: int, batch: int | None = None
) -> tuple[Plan, Reading]:
    """Read settings of other software as a plan, and report what of the file it is made of.

    Args:
        path: the file, written by ``export`` or by hand.
        tool: name of the software.
        graph: the model, which the file does not describe.
        devices: number of devices, if the file does not say.
        batch: samples a step, if the file does not say.

    Raises:
        FileFormatError: a file that cannot be read.
        InputError: a setting that cannot be priced; names it, its value and what to do.
    """
    target_named(tool)
    world = World(str(path), devices, sum(layer.role.value == "block" for layer in graph.layers), batch or 0)
    target = TOOLS[tool]
    values = target.parse(read_text(path, _FILE_BYTES), str(path))
    reading = read(target, values, world, graph.sequence or 0)
    if not reading.read:
        keys = ", ".join(field.key for field in target.fields[:3])
        raise FileFormatError(str(path), "no settings", f"It has none of {target.software}'s: {keys} …")
    return check_plan(plan_from(reading.settings, graph), str(path)), reading
