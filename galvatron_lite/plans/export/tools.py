"""Plans in other software's settings, and back: by the name of ``--for``."""

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

TOOLS: Mapping[str, Tool] = {one.name: one for one in (DEEPSPEED, MEGATRON, TORCHTITAN, ACCELERATE, NEMO)}
_LARGEST = 2**20
_WORDS = {"zero_stage": "ZeRO stage", "data": "replicas of shards", "zero": "shards", "virtual": "virtual stages"}


@dataclass(frozen=True, slots=True)
class Exported:
    """A plan in a tool's words."""

    tool: str  # its name
    text: str  # the file
    left_out: tuple[str, ...]  # what of the plan the file does not say, a line each
    by_hand: tuple[str, ...]  # what the user's own code must do besides


def export(plan: Plan, tool: str, *, strict: bool = False) -> Exported:
    """A plan in a tool's words; the same plan gives the same text.

    Raises:
        InputError: no such tool, a plan that contradicts itself, or (strict) something that the tool's file cannot say.
    """
    target_named(tool)
    target, settings = TOOLS[tool], settings_of(check_plan(plan))
    if settings.precision not in ITEM_BYTES:
        raise InputError("precision", settings.precision, f"Choose one of {', '.join(ITEM_BYTES)}.")
    stack = "" if plan.provenance is None else plan.provenance.stack
    priced = stack == target_named(tool).stack
    body = target.dump(write(target, settings, priced=priced))
    by_hand = tuple(target.by_hand(settings))
    left_out = (*simplified(plan, settings), *_unsaid(target, settings, commented(by_hand) + body))
    if settings.strategy.recompute is Recompute.SELECTIVE and not priced:
        left_out += (f"what is computed again selectively: {target.software} has a list of its own",)
    if strict and left_out:
        more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        remedy = f"{tool} cannot be told of it{more}: leave --strict out, or plan for it: galvatron plan --for {tool}."
        raise InputError("--strict", left_out[0], remedy)
    first = f"{plan.model} on {plan.devices} devices, batch {plan.global_batch}, for {target.software}"
    head = (
        commented([first, *(f"not expressed here: {line}" for line in left_out), *by_hand]) if target.comments else ""
    )
    return Exported(tool, head + body, left_out, by_hand)


def _unsaid(target: Tool, settings: Settings, text: str) -> Iterator[str]:
    """Where the file, read again, says otherwise than the settings that it was written from."""
    main, error = settings.strategy, None
    for devices in (settings.devices, main.batch_degree * main.tensor):
        try:
            world = World("", devices, settings.blocks, settings.batch)
            again = read(target, target.parse(text, ""), world).settings.says()
            break
        except InputError as refused:
            error = refused
    else:
        assert error is not None
        yield f"{error.field.removeprefix(', ')} {error.value}"
        return
    for name, value in settings.says().items():
        if again[name] != value:
            hint = f"; {target.hints[name]}" if name in target.hints else ""
            words = _WORDS.get(name, name.replace("_", " "))
            instead = getattr(again[name], "value", again[name])
            instead = "not set" if instead in (None, "") else instead
            yield f"{words} {getattr(value, 'value', value)} (these settings: {instead}){hint}"


def read_settings(
    path: Path, tool: str, graph: ModelGraph, devices: int, batch: int | None = None
) -> tuple[Plan, Reading]:
    """The plan that a tool's settings are, for a model on so many devices, and what of the file it is made of.

    Args:
        path: the tool's file, written by ``export`` or by its user.
        tool: whose.
        graph: the model, which the file does not describe.
        devices: where the file does not say how many.
        batch: samples a step, where the file does not say.

    Raises:
        FileFormatError: a file that cannot be read.
        InputError: a setting that cannot be priced; names it, its value and what to do.
    """
    target_named(tool)
    world = World(str(path), devices, sum(layer.role.value == "block" for layer in graph.layers), batch or 0)
    target = TOOLS[tool]
    values = target.parse(read_text(path, _LARGEST), str(path))
    reading = read(target, values, world, graph.sequence or 0)
    if not reading.read:
        keys = ", ".join(field.key for field in target.fields[:3])
        raise FileFormatError(str(path), "no settings", f"It has none of {target.software}'s: {keys} …")
    return check_plan(plan_from(reading.settings, graph), str(path)), reading
