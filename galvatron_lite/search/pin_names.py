"""Names of what a user pins or forbids, and how their values are read.

Names are ours and those of Megatron, DeepSpeed and torchtitan. Dimensions declare the fields of ``Strategy`` that can
be pinned (``parallelism.registry.pinned``); what is chosen once for the plan is listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from galvatron_lite.errors import InputError, UnknownNameError, suggestion, unknown
from galvatron_lite.parallelism.backends import ANY, Backend
from galvatron_lite.parallelism.base import StrategyField
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.parallelism.pipeline.schedule import Schedule, schedule_names
from galvatron_lite.parallelism.registry import pinned

Reader = Callable[[str, str], object]
"""From (name, text) to a value; raises InputError."""


@dataclass(frozen=True, slots=True)
class PinName:
    """A choice that can be pinned."""

    name: str  # as the project calls it
    aliases: tuple[str, ...]  # other names
    read: Reader  # reads a value
    field: str  # of ``Fixed`` or ``Pins`` for what is chosen once; of ``Strategy`` for what every layer chooses
    once: bool = False  # whether it is chosen once for the plan
    splits: bool = False  # whether its value multiplies into the devices of a stage
    means: str = ""  # for people


def _number(name: str, text: str, least: int = 1, most: int | None = None, remedy: str = "") -> int:
    if not text.isdecimal() or int(text) < least:
        raise InputError(f"--fix {name}", text, f"Give a whole number, {least} or more.")
    if most is not None and int(text) > most:
        raise InputError(f"--fix {name}", text, remedy)
    return int(text)


def _word(words: Mapping[str, object], remedy: str = "") -> Reader:
    def read(name: str, text: str) -> object:
        if text not in words:
            raise InputError(f"--fix {name}", text, remedy) if remedy else unknown(f"--fix {name}", text, words)
        return words[text]

    return read


def _schedule_named(name: str, text: str) -> object:
    return _word(dict(schedule_names()))(name, text)


_RULES = {rule.value: rule for rule in CyclicRule} | {"v1": CyclicRule.V1, "v2": CyclicRule.V2}
_SETTINGS = {setting.value: setting for setting in CyclicSetting}
_ONCE: tuple[PinName, ...] = (
    PinName("pipeline", ("pp", "stages"), _number, "pipeline", once=True, means="pipeline stages (groups of devices)"),
    PinName("microbatches", ("m", "ga", "gradient_accumulation", "num_microbatches"), _number, "microbatches",
            once=True, means="micro-batches a step"),
    PinName("microbatch", ("micro_batch",), _number, "microbatch", once=True,
            means="samples of a micro-batch over all devices of a stage"),
    PinName("mbs", ("micro_batch_size",), _number, "device_samples", once=True,
            means="samples of a micro-batch on one data-parallel rank; needs dp, or pp, tp and cp"),
    PinName("schedule", (), _schedule_named, "schedule", once=True, means="order of micro-batches in the pipeline"),
    PinName("virtual", ("vpp", "virtual_stages"), _number, "virtual", once=True, means="stages each group runs"),
    PinName("rule", (), _word(_RULES), "rule", once=True, means="cdp-v1 or cdp-v2, of delayed gradients"),
    PinName("setting", (), _word(_SETTINGS), "setting", once=True,
            means="where delayed gradients run: single, data, zero or stages"),
)  # fmt: skip
"""What ``--fix`` takes that is chosen once."""

_OTHER_PINS = {
    **dict.fromkeys(("spatial", "pixels", "picture", "image", "grid"), "height, width or depth"),
    "rows": "height", "columns": "width", "planes": "depth", "filter": "filters", "channel": "filters or channels",
}  # fmt: skip
_OTHER_DIMENSIONS = dict.fromkeys(
    ("pixels", "picture", "image", "grid", "height", "width", "depth", "rows", "columns", "planes"), "spatial"
)
"""Words that people may try, and what to say instead."""


def pin_names() -> tuple[PinName, ...]:
    """Everything that ``--fix`` takes."""
    pins = [*_ONCE]
    for dimension in pinned():  # one that declares no field is pinned by its degree
        degree = StrategyField(dimension.name, dimension.name, dimension.aliases, dimension.means, splits=True)
        for field in dimension.fields or (degree,):
            number = partial(_number, least=field.least, most=field.most, remedy=field.remedy)
            read = number if field.words is None else _word(field.words, field.remedy)
            pins.append(PinName(field.name, field.aliases, read, field.field, splits=field.splits, means=field.means))
    return tuple(pins)


def forbidden_names() -> dict[str, tuple[str, ...]]:
    """What ``--forbid`` takes, and the dimensions that it leaves out."""
    names: dict[str, tuple[str, ...]] = {}
    for words in (("pipeline", "pp"), ("branches", "branch")):
        names |= dict.fromkeys(words, words[:1])
    for dimension in pinned():
        names.update(dimension.forbids or dict.fromkeys((dimension.name, *dimension.aliases), (dimension.name,)))
    return names


def pin_named(text: str) -> PinName:
    """The pin of a name; case and ``-`` for ``_`` do not matter.

    Raises:
        UnknownNameError: no pin has that name.
    """
    by_alias = {alias: pin for pin in pin_names() for alias in (pin.name, *pin.aliases)}
    name = text.lower().replace("-", "_")
    if name not in by_alias:
        names = ["/".join((pin.name, *pin.aliases[:1])) for pin in pin_names()]
        near = suggestion(name, by_alias, _OTHER_PINS)
        raise UnknownNameError("--fix", text, near or f"Known: {', '.join(names)}.")
    return by_alias[name]


def dimensions_named(text: str) -> tuple[str, ...]:
    """The dimensions that forbidding a name leaves out.

    Raises:
        UnknownNameError: no dimension has that name.
    """
    name, names = text.lower(), forbidden_names()
    if name not in names:
        raise unknown("--forbid", text, names, others=_OTHER_DIMENSIONS)
    return names[name]


def typed_name(field: str) -> str:
    """How a user writes a pin of a field."""
    return next((pin.name for pin in pin_names() if pin.field == field), field)


def schedules_named(wanted: Sequence[Schedule | str] | None, pinned: Schedule | None) -> tuple[Schedule, ...] | None:
    """The schedules to choose from, in the order of their names; None where that is left to the search.

    Args:
        wanted: names; None or none: any.
        pinned: the one that ``--fix schedule`` names.

    Raises:
        InputError: a name is unknown or of no pipeline, or the pinned one is not among them.
    """
    named = list[Schedule]()
    for name in wanted or ():
        try:
            schedule = cast("Schedule", _schedule_named("schedule", name.lower()))
        except InputError as error:
            raise UnknownNameError("--schedule", name, error.remedy) from None
        if not schedule.executable:
            raise InputError("--schedule", name, f"It is of no pipeline: --allow-delay --fix schedule={schedule}.")
        named.append(schedule)
    if pinned is None:
        return tuple(dict.fromkeys(named)) or None
    if named and pinned not in named:
        raise InputError("--fix schedule", pinned.value, f"It is not among --schedule {', '.join(named)}.")
    return (pinned,)


_LACKING_WORDS = {
    "context": "context parallelism", "ulysses": "context parallelism", "expert": "expert parallelism",
    "zero_stage": "ZeRO-1", "offload": "offload",
    "virtual": "several stages a group of devices",
}  # fmt: skip
"""What fields of ``Strategy`` and of ``Fixed`` stand for where a backend lacks them."""


def check_backend(fix: Sequence[str], schedules: Sequence[str], backend: Backend) -> None:
    """Refuse pins and schedules that the backend does not run.

    Args:
        fix: pins as they were typed: ``cp=2``, ``layers.3.offload=on``.
        schedules: names of the schedules that are wanted.
        backend: what is to run the plan.

    Raises:
        InputError: the backend does not run one.
    """
    wanted = []
    for typed in fix:
        left, _, text = typed.partition("=")
        if text.strip():
            wanted.append(("--fix", typed, left.strip().rpartition(".")[2], text.strip().lower()))
    wanted += [("--schedule", schedule, "schedule", schedule.lower()) for schedule in schedules]
    for option, typed, name, text in wanted:
        lacking = _lacking(name, text, backend)
        if lacking:
            other = f"; --backend {ANY.name} offers it" if backend.name != ANY.name else ""
            raise InputError(option, typed, f"Backend {backend.name} cannot run {lacking}{other}.")


def _lacking(name: str, text: str, backend: Backend) -> str:
    """What a backend lacks to run a pin, for people; empty where it runs it."""
    pin = pin_named(name)
    value = pin.read(pin.name, text)
    if pin.field == "schedule":
        schedule = cast("Schedule", value)
        return "" if schedule in backend.schedules or not schedule.executable else f"the {schedule} schedule"
    if pin.field == "virtual":
        runs = value == 1 or any(schedule.virtual_stages != 1 for schedule in backend.schedules)
    elif pin.field == "ulysses":
        runs = value is False or backend.limits.get("context") != (1,)
    else:
        runs = value in backend.limits.get(pin.field, (value,))
    return "" if runs else _LACKING_WORDS.get(pin.field, pin.means)
