"""What a user pins (``pp=4``, ``layers.3.recompute=full``) or forbids (``tp``), read and checked.

A pin is ``NAME=VALUE`` for the whole plan, or ``LAYERS.NAME=VALUE`` for some layers: the name of one, or a pattern with
``*`` and ``?`` (``layers.*.tensor=2``). Names are ours and those of Megatron, DeepSpeed and torchtitan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from typing import cast

from galvatron_lite.cost.stage import tied_groups
from galvatron_lite.errors import InputError, UnknownNameError, suggestion, unknown
from galvatron_lite.model.graph import LayerKind, ModelGraph, Role
from galvatron_lite.parallelism.backends import ANY, Backend
from galvatron_lite.parallelism.base import StrategyField
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.pipeline.schedule import DELAYED_SCHEDULE, Schedule, schedule_names
from galvatron_lite.parallelism.registry import choosing, pinned
from galvatron_lite.parallelism.strategy import ADDED, Strategy
from galvatron_lite.search.space import Delay, Fixed, fields_of, nearest

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
    for dimension in pinned():  # of one that says nothing, its degree by its name
        plain = StrategyField(dimension.name, dimension.name, dimension.aliases, dimension.means, splits=True)
        for one in dimension.fields or (plain,):
            number = partial(_number, least=one.least, most=one.most, remedy=one.remedy)
            read = number if one.words is None else _word(one.words, one.remedy)
            pins.append(PinName(one.name, one.aliases, read, one.field, splits=one.splits, means=one.means))
    return tuple(pins)


def forbidden_names() -> dict[str, tuple[str, ...]]:
    """What ``--forbid`` takes, and the dimensions that it leaves out."""
    names: dict[str, tuple[str, ...]] = {}
    for words in (("pipeline", "pp"), ("branches", "branch")):
        names |= dict.fromkeys(words, words[:1])
    for one in pinned():
        names.update(one.forbids or dict.fromkeys((one.name, *one.aliases), (one.name,)))
    return names


def pin_named(text: str) -> PinName:
    """The pin of a name; case and ``-`` for ``_`` do not matter."""
    by_alias = {alias: pin for pin in pin_names() for alias in (pin.name, *pin.aliases)}
    name = text.lower().replace("-", "_")
    if name not in by_alias:
        every = ["/".join((pin.name, *pin.aliases[:1])) for pin in pin_names()]
        near = suggestion(name, by_alias, _OTHER_PINS)
        raise UnknownNameError("--fix", text, near or f"Known: {', '.join(every)}.")
    return by_alias[name]


def dimensions_named(text: str) -> tuple[str, ...]:
    """The dimensions that forbidding a name leaves out."""
    name, dimensions_known = text.lower(), forbidden_names()
    if name not in dimensions_known:
        raise unknown("--forbid", text, dimensions_known, others=_OTHER_DIMENSIONS)
    return dimensions_known[name]


def typed_name(field: str) -> str:
    """How a user writes a pin of a field."""
    return next((pin.name for pin in pin_names() if pin.field == field), field)


def schedules_named(wanted: Sequence[Schedule | str] | None, pinned: Schedule | None) -> tuple[Schedule, ...] | None:
    """The schedules to choose from, in the order given; None where that is left to the search.

    Args:
        wanted: names; None or none: not said.
        pinned: the only one that is wanted.
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
    """Refuse what is pinned or asked for and the backend does not run.

    Args:
        fix: pins as they were typed: ``cp=2``, ``layers.3.offload=on``.
        schedules: names of the schedules asked for.
        backend: what is to run the plan.
    """
    reasons = []
    for given in fix:
        left, _, text = given.partition("=")
        if text.strip():
            reasons.append(("--fix", given, left.strip().rpartition(".")[2], text.strip().lower()))
    reasons += [("--schedule", schedule, "schedule", schedule.lower()) for schedule in schedules]
    for option, given, name, text in reasons:
        lacking = _lacking(name, text, backend)
        if lacking:
            other = f"; --backend {ANY.name} offers it" if backend.name != ANY.name else ""
            raise InputError(option, given, f"Backend {backend.name} cannot run {lacking}{other}.")


def _lacking(name: str, text: str, backend: Backend) -> str:
    pin = pin_named(name)
    value = pin.read(pin.name, text)
    if pin.field == "schedule":
        order = cast("Schedule", value)
        return "" if order in backend.schedules or not order.executable else f"the {order} schedule"
    if pin.field == "virtual":
        runs = value == 1 or any(order.virtual_stages != 1 for order in backend.schedules)
    elif pin.field == "ulysses":
        runs = value is False or backend.limits.get("context") != (1,)
    else:
        runs = value in backend.limits.get(pin.field, (value,))
    return "" if runs else _LACKING_WORDS.get(pin.field, pin.means)


Pin = tuple[str, str, object]
"""What the user wrote, field of ``Strategy``, value."""


def check_pins(graph: ModelGraph, fixed: Fixed) -> None:
    """Raise InputError where pins contradict one another or what is forbidden, or name no layer."""
    for names, name, value in fixed.layers:
        if not any(fnmatchcase(layer.name, names) for layer in graph.layers):
            some = ", ".join(layer.name for layer in graph.layers[:3])
            raise InputError(f"--fix {names}.{name}", value, f"No layer has that name; there are {some}, ...")
    if "pipeline" in fixed.forbidden and (fixed.pipeline or 1) > 1:
        raise InputError("--fix pp", fixed.pipeline, "--forbid pipeline rules it out; lift one of the two.")
    if fixed.pipeline == 1 and (fixed.virtual or 1) > 1:
        raise InputError("--fix virtual", fixed.virtual, "It needs a pipeline, and --fix pp=1 rules that out.")
    model_pins = [(f"--fix {name}", name, value) for name, value in fixed.strategy]
    _check_against(model_pins, fixed.forbidden)
    _check_one_another(model_pins)
    for layer in graph.layers:
        layer_pins = [(f"--fix {names}.{f}", f, v) for names, f, v in fixed.layers if fnmatchcase(layer.name, names)]
        _check_against(layer_pins, fixed.forbidden)
        _check_one_another([*model_pins, *layer_pins])


def _check_against(pins: Sequence[Pin], forbidden: Sequence[str]) -> None:
    for option, name, value in pins:
        for dimension in forbidden:
            if name in fields_of(dimension) and value != getattr(Strategy(), name):
                raise InputError(option, _shown(value), f"--forbid {dimension} rules {name} out; lift one of the two.")


def _check_one_another(pins: Sequence[Pin]) -> None:
    first: dict[str, Pin] = {}
    for pin in pins:
        option, name, value = pin
        other = first.setdefault(name, pin)
        if other[2] != value:
            raise InputError(
                option, _shown(value), f"{other[0]}={_shown(other[2])} asks for another; lift one of them."
            )


def _shown(value: object) -> object:
    return getattr(value, "value", value)


def schedules_for(fixed: Fixed, schedules: Sequence[Schedule] | None, backend: Backend) -> tuple[Schedule, ...]:
    """The schedules to choose from.

    Args:
        fixed: may pin one, or a number of virtual stages.
        schedules: that are asked for; None: all that the backend runs.
        backend: what is to run the plan.

    Raises:
        InputError: none is named, the backend does not run one, or pins leave none.
    """
    asked = backend.schedules if schedules is None else tuple(schedules)
    if not asked:
        raise InputError("schedules", schedules, "Name at least one.")
    offered = ", ".join(schedule.value for schedule in backend.schedules)
    for schedule in asked:
        if schedule not in backend.schedules:
            raise InputError("schedules", schedule.value, f"Backend {backend.name} does not train with it; {offered}.")
    if fixed.schedule is not None:
        if fixed.schedule not in asked:
            raise InputError("--fix schedule", fixed.schedule.value, f"Backend {backend.name} offers {offered}.")
        asked = (fixed.schedule,)
    several = [own for own in asked if own.virtual_stages != 1]
    if (fixed.virtual or 1) > 1 and not several:
        names = ", ".join(own.value for own in asked)
        raise InputError("--fix virtual", fixed.virtual, f"Schedule {names} runs one stage a group of devices.")
    return asked


@dataclass(frozen=True, slots=True)
class Pins:
    """What is not left to the search, before the devices and the batch are known."""

    fixed: Fixed = field(default_factory=Fixed)  # what depends on neither
    microbatch: int | None = None  # samples of a micro-batch over all devices of a stage; None: searched
    # samples of a micro-batch on one rank that works on whole samples; None: searched
    device_samples: int | None = None
    delay: Delay | None = None  # what is said of delayed gradients; None: nothing
    notes: tuple[str, ...] = ()  # pins that some blocks do not offer, a line each

    def delay_where(self, *, allowed: bool) -> Delay | None:
        """Which rules of delayed gradients may be used; None: none."""
        if self.delay is None:
            return Delay() if allowed else None
        if not allowed:
            settings = (("setting", self.delay.setting), ("rule", self.delay.rule))
            some = [(name, own.value) for name, own in settings if own is not None]
            name, value = some[0] if some else ("schedule", DELAYED_SCHEDULE)
            remedy = "It trains by delayed gradients: the training rule changes. Allow that: --allow-delay."
            raise InputError(f"--fix {name}", value, remedy)
        return self.delay

    def at(self, devices: int, batch: int) -> Fixed:
        """What is fixed for so many devices and samples a step."""
        self._check_degrees(devices)
        samples = self._samples(devices)
        if samples is None:
            return self.fixed
        if batch % samples:
            remedy = f"It must divide the batch of {batch} samples; the nearest: {nearest(divisors(batch), samples)}."
            raise InputError("--fix microbatch", samples, remedy)
        return replace(self.fixed, microbatches=batch // samples)

    def _samples(self, devices: int) -> int | None:
        if self.device_samples is None:
            return self.microbatch
        degree = self._batch_degree(devices)
        if degree is None:
            raise InputError(
                "--fix mbs", self.device_samples, "How many ranks share a micro-batch is open: fix dp too, or pp, tp "
                "and cp; or fix microbatch, the samples over all devices of a stage.",
            )  # fmt: skip
        return self.device_samples * degree

    def _batch_degree(self, devices: int) -> int | None:
        known = dict(self.fixed.strategy)
        if "batch_degree" in known:
            return int(str(known["batch_degree"]))
        off = {name for dimension in self.fixed.forbidden for name in fields_of(dimension)}
        degrees = [1 if name in off else known.get(name) for name in ("tensor", "context")]
        if self.fixed.pipeline is None or None in degrees:
            return None
        return devices // prod([self.fixed.pipeline, *(int(str(degree)) for degree in degrees)])

    def _check_degrees(self, devices: int) -> None:
        """Degrees that are pinned for one layer, and those for all, must multiply to a divisor of the devices."""
        splitting = {pin.field: pin.name for pin in pin_names() if pin.splits}
        degrees = {splitting[name]: int(str(value)) for name, value in self.fixed.strategy if name in splitting}
        if self.fixed.pipeline is not None:
            degrees = {"pipeline": self.fixed.pipeline, **degrees}
        some = {(splitting[name], int(str(value))) for _, name, value in self.fixed.layers if name in splitting}
        for known in (degrees, *(degrees | {name: value} for name, value in sorted(some))):
            if devices % prod(known.values()):
                options = " ".join(f"--fix {name}={value}" for name, value in known.items())
                raise InputError(
                    options.partition("=")[0] if len(known) == 1 else options, prod(known.values()),
                    f"It must divide the {devices} devices: one of {', '.join(map(str, divisors(devices)))}.",
                )  # fmt: skip


NOTHING = Pins()
"""Everything is left to the search."""


def read_pins(fix: Sequence[str], forbid: Sequence[str], graph: ModelGraph) -> Pins:
    """The pins and forbidden dimensions that a user wrote.

    Args:
        fix: ``NAME=VALUE`` or ``LAYERS.NAME=VALUE``.
        forbid: names of dimensions.
        graph: whose layers may be named.
    """
    forbidden = tuple(dict.fromkeys(name for text in forbid for name in dimensions_named(text)))
    once: dict[str, object] = {"pipeline": 1} if "pipeline" in forbidden else {}
    every: dict[str, object] = {}
    some: dict[tuple[str, str], object] = {}
    for text in fix:
        layers, pin, value = _read(text, graph)
        if layers is not None:
            _put(some, (layers, pin.field), value, text)
        else:
            _put(once if pin.once else every, pin.field, value, text)
    some = _narrowest(some, graph)
    for name, value in [*every.items(), *((name, value) for (_, name), value in some.items())]:
        for dimension in forbidden:
            if name in fields_of(dimension) and value != getattr(Strategy(), name):
                raise InputError("--forbid", dimension, f"It is also fixed to {value}: give one of them.")
    counted = [pin.name for pin in pin_names() if pin.field in once and pin.field in _COUNTED]
    if len(counted) > 1:
        raise InputError("--fix", counted[1], f"It says the same as {counted[0]}: give one of them.")
    samples = {name: once.pop(name, None) for name in ("microbatch", "device_samples")}
    order = cast("Schedule | None", once.get("schedule"))
    delayed = order is not None and not order.executable
    if delayed:
        del once["schedule"]
    rule, setting = once.pop("rule", None), once.pop("setting", None)
    if delayed or rule is not None or setting is not None:
        samples["delay"] = Delay(rule, setting, only=True)  # type: ignore[arg-type]
    model_pins, partly = _offered(every, some, graph)
    fixed = Fixed(
        **once,  # type: ignore[arg-type]
        strategy=model_pins,
        layers=(*partly, *((layers, name, value) for (layers, name), value in some.items())),
        forbidden=forbidden,
    )
    return Pins(fixed, **samples, notes=_unoffered(partly, graph))  # type: ignore[arg-type]


def _narrowest(some: dict[tuple[str, str], object], graph: ModelGraph) -> dict[tuple[str, str], object]:
    """Pins of layers such that no two say otherwise of one: the one that names fewer layers holds."""
    names = [layer.name for layer in graph.layers]
    meant = {layers: [name for name in names if fnmatchcase(name, layers)] for layers, _ in some}
    values = dict[tuple[str, str], object]()
    for (layers, field_name), value in some.items():
        rivals = [(other, rival) for (other, name), rival in some.items() if name == field_name and rival != value]
        narrower = [meant[other] for other, _ in rivals if len(meant[other]) < len(meant[layers])]
        fields = [one for one in meant[layers] if not any(one in layers_of for layers_of in narrower)]
        equal = [
            (other, rival) for other, rival in rivals
            if len(meant[other]) == len(meant[layers]) and set(fields) & set(meant[other])
        ]  # fmt: skip
        if equal:
            typed = typed_name(field_name)
            other, rival = equal[0]
            raise InputError(
                "--fix", f"{layers}.{typed}={_shown(value)}",
                f"--fix {other}.{typed}={_shown(rival)} asks for another of the same layer; lift one of them.",
            )  # fmt: skip
        kept = [layers] if fields == meant[layers] else fields
        values |= {(one, field_name): value for one in kept}
    return values


def _read(pin_text: str, graph: ModelGraph) -> tuple[str | None, PinName, object]:
    left, equals, text = pin_text.partition("=")
    if not equals or not text.strip():
        raise InputError("--fix", pin_text, "Write NAME=VALUE or LAYERS.NAME=VALUE: pp=4, layers.3.recompute=full.")
    layers, _, name = left.strip().rpartition(".")
    pin = pin_named(name)
    value = pin.read(pin.name, text.strip().lower())
    if not layers:
        return None, pin, value
    if pin.once:
        raise InputError("--fix", pin_text, f"{pin.name} is chosen once for the whole plan: write {name}={text}.")
    names = [layer.name for layer in graph.layers]
    if not any(fnmatchcase(name, layers) for name in names):
        raise InputError(
            "--fix", pin_text, f"{suggestion(layers, names)} Layers of {graph.name}: {_few(names)}.".lstrip()
        )
    return layers, pin, value


def _offered(
    every: dict[str, object], some: Mapping[tuple[str, str], object], graph: ModelGraph
) -> tuple[tuple[tuple[str, object], ...], tuple[tuple[str, str, object], ...]]:
    """Pins of every layer as those that all layers offer, and those of the layers that do.

    An embedding has no experts and nothing to recompute: ``recompute=full`` means the layers that can be. What is said
    of some layers (``some``) holds there instead.
    """
    model_pins, partly = list[tuple[str, object]](), list[tuple[str, str, object]]()
    for field_name, value in every.items():
        offered_by_kind = {
            kind: _values(graph.kinds[kind], field_name, value) for kind in {layer.kind for layer in graph.layers}
        }
        able = [layer.name for layer in graph.layers if value in offered_by_kind[layer.kind]]
        # layers that share parameters have one strategy, those around the blocks one layout: a pin holds for all
        # or for none of them
        tied = [{graph.layers[place].name for place in group} for group in tied_groups(graph)]
        if any(pin.field == field_name and pin.splits for pin in pin_names()):
            tied.append({layer.name for layer in graph.layers if layer.role is not Role.BLOCK})
        for group in tied:
            able = able if group <= {*able} else [name for name in able if name not in group] or able
        if not able:
            others = {value for values in offered_by_kind.values() for value in values} - {
                getattr(Strategy(), field_name, None)
            }
            offered = ", ".join(sorted((str(_shown(one)) for one in others), key=lambda text: (len(text), text)))
            owners = [one for one in choosing() if field_name in fields_of(one.name)]
            kinds = [graph.kinds[layer.kind] for layer in graph.layers if layer.role is Role.BLOCK]
            reason = next((why for kind in kinds for owner in owners if (why := owner.reason(kind))), "")
            remedy = f"No layer of {graph.name} offers it{f', only {offered}' if offered else ''}. {reason}".rstrip()
            raise InputError(f"--fix {typed_name(field_name)}", str(_shown(value)), remedy)
        apart = [layers for layers, name in some if name == field_name]
        able = [name for name in able if not any(fnmatchcase(name, layers) for layers in apart)]
        if len(able) == len(graph.layers):
            model_pins.append((field_name, value))
        else:
            partly += [(name, field_name, value) for name in able]
    return tuple(model_pins), tuple(partly)


def _unoffered(partly: Sequence[tuple[str, str, object]], graph: ModelGraph) -> tuple[str, ...]:
    lines = []
    for field_name, value in dict.fromkeys((field_name, value) for _, field_name, value in partly):
        able = {layer for layer, name, pinned in partly if (name, pinned) == (field_name, value)}
        unable = [layer.name for layer in graph.layers if layer.role is Role.BLOCK and layer.name not in able]
        if unable:
            pin = f"--fix {typed_name(field_name)}={_shown(value)}"
            lines.append(f"{pin} is not possible for {_few(unable)}, and holds for the other layers")
    return tuple(lines)


def _values(kind: LayerKind, field_name: str, value: object) -> set[object]:
    """What a kind of layer offers of a field of ``Strategy``, on as many devices as the value may ask for."""
    if field_name not in (*Strategy.__slots__, *ADDED):
        return {value}
    devices = _MANY * value if isinstance(value, int) and value > 1 else _MANY
    choices = (choice for dimension in choosing() for choice in dimension.choices(kind, devices))
    return {choice[field_name] for choice in choices if field_name in choice}


_MANY = 64
"""Devices on which every dimension of a kind of layer has choices."""


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])}, …, {', '.join(names[-2:])}"


def _put(pins: dict[str, object] | dict[tuple[str, str], object], key: object, value: object, text: str) -> None:
    table: dict[object, object] = pins  # type: ignore[assignment]
    if table.setdefault(key, value) != value:
        raise InputError("--fix", text, f"It is also fixed to {table[key]}, or forbidden: give one of them.")


_COUNTED = ("microbatches", "microbatch", "device_samples")
"""Pins of which each tells the micro-batches."""
