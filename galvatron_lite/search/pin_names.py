"""The names a pin may have (ours, and those of Megatron, DeepSpeed and torchtitan), and the backends that run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.backends import ANY, Backend
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.parallelism.strategy import Offload
from galvatron_lite.plans.schema import Schedule

Reader = Callable[[str, str], object]
"""From (name, text) to a value; raises InputError."""


@dataclass(frozen=True, slots=True)
class PinName:
    """A thing that can be pinned."""

    name: str  # as the project calls it
    aliases: tuple[str, ...]  # what else it is called
    read: Reader  # reads a value
    field: str  # of ``Fixed`` or ``Pins`` for what is chosen once; of ``Strategy`` for what every layer chooses
    once: bool = False  # whether it is chosen once for the whole plan
    splits: bool = False  # whether its value multiplies into the devices of a stage
    means: str = ""  # for people


NO_OTHERS: Mapping[str, str] = MappingProxyType({})


def _number(name: str, text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise InputError(f"--fix {name}", text, f"Give a whole number, {least} or more.")
    return int(text)


def _stage(name: str, text: str) -> int:
    number = _number(name, text, 0)
    if number > 3:
        raise InputError(f"--fix {name}", text, "ZeRO has stages 0 (off), 1, 2 and 3.")
    return number


def _switch(name: str, text: str) -> bool:
    words = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
    if text not in words:
        raise InputError(f"--fix {name}", text, "Give on or off.")
    return words[text]


def _word(words: dict[str, object]) -> Reader:
    def read(name: str, text: str) -> object:
        if text not in words:
            raise InputError(f"--fix {name}", text, f"{near(text, words)}Give one of {', '.join(words)}.")
        return words[text]

    return read


_SCHEDULES: dict[str, object] = {
    **{schedule.value: schedule for schedule in Schedule},
    "interleaved": Schedule.INTERLEAVED, "zb1p": Schedule.ZERO_BUBBLE_1P, "zb2p": Schedule.ZERO_BUBBLE_2P,
    "zbv": Schedule.ZERO_BUBBLE_V,
}  # fmt: skip
_RECOMPUTE: dict[str, object] = {choice.value: choice for choice in Recompute}
_RECOMPUTE |= {"off": Recompute.NONE, "on": Recompute.FULL}
_OFFLOAD: dict[str, object] = {choice.value: choice for choice in Offload}
_OFFLOAD |= {"off": Offload.NONE, "on": Offload.ALL, "optimizer": Offload.STATES}
_RULES: dict[str, object] = {rule.value: rule for rule in CyclicRule}
_RULES |= {"v1": CyclicRule.V1, "v2": CyclicRule.V2}
_SETTINGS: dict[str, object] = {setting.value: setting for setting in CyclicSetting}

NAMES: tuple[PinName, ...] = (
    PinName("pipeline", ("pp", "stages"), _number, "pipeline", once=True, means="pipeline stages (groups of devices)"),
    PinName("microbatches", ("m", "ga", "gradient_accumulation", "num_microbatches"), _number, "microbatches",
            once=True, means="micro-batches a step"),
    PinName("microbatch", ("micro_batch",), _number, "microbatch", once=True,
            means="samples of a micro-batch over all devices of a stage"),
    PinName("mbs", ("micro_batch_size",), _number, "device_samples", once=True,
            means="samples of a micro-batch on one data-parallel rank; needs dp, or pp, tp and cp"),
    PinName("schedule", (), _word(_SCHEDULES), "schedule", once=True, means="order of micro-batches in the pipeline"),
    PinName("virtual", ("vpp", "virtual_stages"), _number, "virtual", once=True, means="stages each group runs"),
    PinName("rule", (), _word(_RULES), "rule", once=True, means="cdp-v1 or cdp-v2, of delayed gradients"),
    PinName("setting", (), _word(_SETTINGS), "setting", once=True,
            means="where delayed gradients run: single, data, zero or stages"),
    PinName("dp", ("batch_degree",), _number, "batch_degree", splits=True, means="replicas times shards"),
    PinName("data", ("ddp", "replicas"), _number, "data", means="replicas that hold all states"),
    PinName("zero", ("zero_stage",), _stage, "zero_stage", means="ZeRO stage, 0 to 3"),
    PinName("shards", ("fsdp", "zero_degree"), _number, "zero", means="devices that share states"),
    PinName("tensor", ("tp",), _number, "tensor", splits=True, means="tensor-parallel degree"),
    PinName("sequence", ("sp", "sequence_parallel"), _switch, "sequence_parallel", means="on or off, beside tensor"),
    PinName("context", ("cp",), _number, "context", splits=True, means="context-parallel degree"),
    PinName("ulysses", (), _switch, "ulysses", means="on or off: heads for tokens instead of a ring"),
    PinName("expert", ("ep",), _number, "expert", means="expert-parallel degree"),
    PinName("expert_tensor", ("etp",), _number, "expert_tensor", means="tensor degree of experts"),
    PinName("depth", (), _number, "depth", splits=True, means="devices that share the planes of a volume"),
    PinName("height", (), _number, "height", splits=True, means="devices that share the rows of a picture"),
    PinName("width", (), _number, "width", splits=True, means="devices that share the columns of a picture"),
    PinName("filters", (), _number, "filters", splits=True, means="devices that share convolutions' output channels"),
    PinName("channels", (), _number, "channels", splits=True, means="devices that share convolutions' input channels"),
    PinName("recompute", ("ckpt", "checkpointing", "ac"), _word(_RECOMPUTE), "recompute",
            means="none, selective or full"),
    PinName("offload", (), _word(_OFFLOAD), "offload", means="none, states, activations or all"),
)  # fmt: skip
"""Everything that ``--fix`` takes."""

FORBIDDEN: dict[str, tuple[str, ...]] = {
    "pipeline": ("pipeline",), "pp": ("pipeline",), "data": ("data",), "ddp": ("data",), "zero": ("zero",),
    "fsdp": ("zero",), "dp": ("data", "zero"), "tensor": ("tensor",), "tp": ("tensor",), "sequence": ("sequence",),
    "sp": ("sequence",), "context": ("context",), "cp": ("context",), "ulysses": ("ulysses",), "expert": ("expert",),
    "ep": ("expert",), "recompute": ("recompute",), "ckpt": ("recompute",), "offload": ("offload",),
    "spatial": ("spatial",), "filters": ("filters",), "channels": ("channels",),
    "channel": ("filters", "channels"), "branches": ("branches",), "branch": ("branches",),
}  # fmt: skip
"""What ``--forbid`` takes, and the dimensions that it leaves out."""


_OTHER_PINS = {
    **dict.fromkeys(("spatial", "pixels", "picture", "image", "grid"), "height, width or depth"),
    "rows": "height", "columns": "width", "planes": "depth", "filter": "filters", "channel": "filters or channels",
}  # fmt: skip
_OTHER_DIMENSIONS = dict.fromkeys(
    ("pixels", "picture", "image", "grid", "height", "width", "depth", "rows", "columns", "planes"), "spatial"
)
"""Words that people may try, and what to say instead."""


def pin_named(text: str) -> PinName:
    """The pin of a name; case and ``-`` for ``_`` do not matter."""
    known = {alias: pin for pin in NAMES for alias in (pin.name, *pin.aliases)}
    name = text.lower().replace("-", "_")
    if name not in known:
        every = ", ".join("/".join((pin.name, *pin.aliases[:1])) for pin in NAMES)
        raise InputError("--fix", text, f"{near(name, known, _OTHER_PINS)}Known: {every}.")
    return known[name]


def dimensions_named(text: str) -> tuple[str, ...]:
    """The dimensions that forbidding a name leaves out."""
    name = text.lower()
    if name not in FORBIDDEN:
        raise InputError("--forbid", text, f"{near(name, FORBIDDEN, _OTHER_DIMENSIONS)}Known: {', '.join(FORBIDDEN)}.")
    return FORBIDDEN[name]


def typed_name(field: str) -> str:
    """How a user writes a pin of a field."""
    return next((pin.name for pin in NAMES if pin.field == field), field)


def near(text: str, names: Iterable[str], others: Mapping[str, str] = NO_OTHERS) -> str:
    """``Did you mean X?`` and a space; empty where nothing known is like it and ``others`` does not tell."""
    close = [others[text]] if text in others else get_close_matches(text, list(names), n=1)
    return f"Did you mean {close[0]}? " if close else ""


def schedules_named(wanted: Sequence[Schedule | str] | None, pinned: Schedule | None) -> tuple[Schedule, ...] | None:
    """The schedules to choose from, in the order given; None where that is left to the search.

    Args:
        wanted: names; None or none: not said.
        pinned: the only one that is wanted.
    """
    named = tuple(dict.fromkeys(_schedule(name) for name in wanted or ()))
    if pinned is None:
        return named or None
    if named and pinned not in named:
        raise InputError("--fix schedule", pinned.value, f"It is not among --schedule {', '.join(named)}.")
    return (pinned,)


def _schedule(name: str) -> Schedule:
    try:
        schedule = Schedule(str(pin_named("schedule").read("schedule", name.lower())))
    except InputError as error:
        raise InputError("--schedule", name, error.remedy) from None
    if not schedule.executable:
        raise InputError("--schedule", name, "It is of no pipeline: --allow-delay --fix schedule=cyclic.")
    return schedule


_LACKING_WORDS = {
    "context": "context parallelism", "ulysses": "context parallelism", "expert": "expert parallelism",
    "zero_stage": "ZeRO-1", "offload": "offload",
    "virtual": "several stages a group of devices",
}  # fmt: skip
"""What fields of ``Strategy`` and of ``Fixed`` stand for where a backend lacks them."""


def check_backend(fix: Sequence[str], schedules: Sequence[str], backend: Backend) -> None:
    """Refuse what is pinned or asked for and the backend does not run.

    Args:
        fix: pins as they were typed: ``cp=2``, ``layers.3.offload=on``.
        schedules: names of the schedules asked for.
        backend: what is to run the plan.
    """
    for given in fix:
        left, equals, text = given.partition("=")
        name = left.strip().rpartition(".")[2]
        lacking = _lacking(name, text.strip().lower(), backend) if equals and text.strip() else ""
        if lacking:
            raise _refused("--fix", given, lacking, backend)
    for given in schedules:
        lacking = _lacking("schedule", given.lower(), backend)
        if lacking:
            raise _refused("--schedule", given, lacking, backend)


def _refused(option: str, text: str, lacking: str, backend: Backend) -> InputError:
    other = f"; --backend {ANY.name} offers it" if backend.name != ANY.name else ""
    return InputError(option, text, f"Backend {backend.name} cannot run {lacking}{other}.")


def _lacking(name: str, text: str, backend: Backend) -> str:
    """What the backend would need for one pin, in words; empty where it runs it."""
    pin = pin_named(name)
    value = pin.read(pin.name, text)
    if pin.field == "schedule":
        return "" if value in (*backend.schedules, Schedule.CYCLIC) else f"the {Schedule(str(value)).value} schedule"
    if pin.field == "virtual":
        runs = value == 1 or any(order.virtual_stages != 1 for order in backend.schedules)
    elif pin.field == "ulysses":
        runs = value is False or backend.values.get("context") != (1,)
    else:
        runs = value in backend.values.get(pin.field, (value,))
    return "" if runs else _LACKING_WORDS.get(pin.field, pin.means)
