"""What a user pins (``pp=4``, ``layers.3.recompute=full``) or forbids (``tp``), read and checked.

A pin is ``NAME=VALUE`` for the plan, or ``LAYERS.NAME=VALUE`` for some layers: the name of one, or a pattern with
``*`` and ``?`` (``layers.*.tensor=2``). ``read_pins`` makes ``Pins`` of them, ``Pins.at`` the ``Fixed`` of a number of
devices and a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import cast

from galvatron_lite.cost.stage import tied_groups
from galvatron_lite.errors import InputError, suggestion
from galvatron_lite.model.graph import LayerKind, ModelGraph, Role
from galvatron_lite.parallelism.backends import Backend
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.pipeline.schedule import DELAYED_SCHEDULE, Schedule
from galvatron_lite.parallelism.registry import choosing
from galvatron_lite.parallelism.strategy import ADDED, Strategy
from galvatron_lite.search.pin_names import PinName, dimensions_named, pin_named, pin_names, typed_name
from galvatron_lite.search.space import Delay, Fixed, fields_of, nearest

Pin = tuple[str, str, object]
"""What the user wrote, field of ``Strategy``, value."""
LayerPin = tuple[str, str, object]
"""Name or pattern of layers, field of ``Strategy``, value."""
_MANY = 64
"""Devices on which every dimension of a kind of layer has choices."""
_MICROBATCH_PINS = ("microbatches", "microbatch", "device_samples")
"""Pins that each settle the number of micro-batches."""


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
            remedy = f"{other[0]}={_shown(other[2])} asks for another; lift one of them."
            raise InputError(option, _shown(value), remedy)


def _shown(value: object) -> object:
    return getattr(value, "value", value)


def schedules_for(fixed: Fixed, schedules: Sequence[Schedule] | None, backend: Backend) -> tuple[Schedule, ...]:
    """The schedules to choose from.

    Args:
        fixed: may pin one, or a number of virtual stages.
        schedules: that are wanted; None: all that the backend runs.
        backend: what is to run the plan.

    Raises:
        InputError: none is wanted, the backend does not run one, or pins leave none.
    """
    wanted = backend.schedules if schedules is None else tuple(schedules)
    if not wanted:
        raise InputError("schedules", schedules, "Name at least one.")
    offered = ", ".join(schedule.value for schedule in backend.schedules)
    for schedule in wanted:
        if schedule not in backend.schedules:
            raise InputError("schedules", schedule.value, f"Backend {backend.name} does not train with it; {offered}.")
    if fixed.schedule is not None:
        if fixed.schedule not in wanted:
            raise InputError("--fix schedule", fixed.schedule.value, f"Backend {backend.name} offers {offered}.")
        wanted = (fixed.schedule,)
    if (fixed.virtual or 1) > 1 and all(schedule.virtual_stages == 1 for schedule in wanted):
        names = ", ".join(schedule.value for schedule in wanted)
        raise InputError("--fix virtual", fixed.virtual, f"Schedule {names} runs one stage a group of devices.")
    return wanted


@dataclass(frozen=True, slots=True)
class Pins:
    """What is not left to the search, before the devices and the batch are known."""

    fixed: Fixed = field(default_factory=Fixed)  # what depends on neither
    microbatch: int | None = None  # samples of a micro-batch over all devices of a stage; None: searched
    device_samples: int | None = None  # samples of a micro-batch on one data-parallel rank; None: searched
    delay: Delay | None = None  # pins of delayed gradients; None: none
    notes: tuple[str, ...] = ()  # pins that some blocks do not offer, a line each

    def delay_where(self, *, allowed: bool) -> Delay | None:
        """Which rules of delayed gradients may be used; None: none.

        Raises:
            InputError: pins ask for delayed gradients, which are not allowed.
        """
        if self.delay is None:
            return Delay() if allowed else None
        if not allowed:
            pins = (("setting", self.delay.setting), ("rule", self.delay.rule))
            typed = [(name, value.value) for name, value in pins if value is not None]
            name, value = typed[0] if typed else ("schedule", DELAYED_SCHEDULE)
            remedy = "It trains by delayed gradients: the training rule changes. Allow that: --allow-delay."
            raise InputError(f"--fix {name}", value, remedy)
        return self.delay

    def at(self, devices: int, batch: int) -> Fixed:
        """What is fixed for so many devices and samples a step.

        Raises:
            InputError: degrees do not divide the devices, or micro-batches the batch.
        """
        self._check_degrees(devices)
        samples = self._samples(devices)
        if samples is None:
            return self.fixed
        if batch % samples:
            remedy = f"It must divide the batch of {batch} samples; the nearest: {nearest(divisors(batch), samples)}."
            raise InputError("--fix microbatch", samples, remedy)
        return replace(self.fixed, microbatches=batch // samples)

    def _samples(self, devices: int) -> int | None:
        """Samples of a micro-batch over all devices of a stage."""
        if self.device_samples is None:
            return self.microbatch
        degree = self._batch_degree(devices)
        if degree is None:
            remedy = (
                "How many ranks share a micro-batch is open: fix dp too, or pp, tp and cp; or fix microbatch, the "
                "samples over all devices of a stage."
            )
            raise InputError("--fix mbs", self.device_samples, remedy)
        return self.device_samples * degree

    def _batch_degree(self, devices: int) -> int | None:
        pinned = dict(self.fixed.strategy)
        if "batch_degree" in pinned:
            return int(str(pinned["batch_degree"]))
        off = {name for dimension in self.fixed.forbidden for name in fields_of(dimension)}
        degrees = [1 if name in off else pinned.get(name) for name in ("tensor", "context")]
        if self.fixed.pipeline is None or None in degrees:
            return None
        return devices // prod([self.fixed.pipeline, *(int(str(degree)) for degree in degrees)])

    def _check_degrees(self, devices: int) -> None:
        """Degrees that are pinned for one layer, and those for all, must multiply to a divisor of the devices."""
        splitting = {pin.field: pin.name for pin in pin_names() if pin.splits}
        degrees = {splitting[name]: int(str(value)) for name, value in self.fixed.strategy if name in splitting}
        if self.fixed.pipeline is not None:
            degrees = {"pipeline": self.fixed.pipeline, **degrees}
        by_layer = {(splitting[name], int(str(value))) for _, name, value in self.fixed.layers if name in splitting}
        for product in (degrees, *(degrees | {name: value} for name, value in sorted(by_layer))):
            if devices % prod(product.values()):
                options = " ".join(f"--fix {name}={value}" for name, value in product.items())
                option = options.partition("=")[0] if len(product) == 1 else options
                remedy = f"It must divide the {devices} devices: one of {', '.join(map(str, divisors(devices)))}."
                raise InputError(option, prod(product.values()), remedy)


NOTHING = Pins()
"""Everything is left to the search."""


def read_pins(fix: Sequence[str], forbid: Sequence[str], graph: ModelGraph) -> Pins:
    """The pins and forbidden dimensions that a user wrote.

    Args:
        fix: ``NAME=VALUE`` or ``LAYERS.NAME=VALUE``.
        forbid: names of dimensions.
        graph: whose layers may be named.

    Raises:
        InputError: a name or value is unknown or not offered, or pins contradict one another.
    """
    forbidden = tuple(dict.fromkeys(name for text in forbid for name in dimensions_named(text)))
    once: dict[str, object] = {"pipeline": 1} if "pipeline" in forbidden else {}
    for_all: dict[str, object] = {}
    for_layers: dict[tuple[str, str], object] = {}
    for text in fix:
        layers, pin, value = _read(text, graph)
        if layers is not None:
            _put(for_layers, (layers, pin.field), value, text)
        else:
            _put(once if pin.once else for_all, pin.field, value, text)
    for_layers = _narrowest(for_layers, graph)
    for name, value in [*for_all.items(), *((name, value) for (_, name), value in for_layers.items())]:
        for dimension in forbidden:
            if name in fields_of(dimension) and value != getattr(Strategy(), name):
                raise InputError("--forbid", dimension, f"It is also fixed to {value}: give one of them.")
    counts = [pin.name for pin in pin_names() if pin.field in once and pin.field in _MICROBATCH_PINS]
    if len(counts) > 1:
        raise InputError("--fix", counts[1], f"It says the same as {counts[0]}: give one of them.")
    others = {name: once.pop(name, None) for name in ("microbatch", "device_samples")}
    delay = _delay(once)
    model_pins, layer_pins = _offered(for_all, for_layers, graph)
    pinned_by_name = ((layers, name, value) for (layers, name), value in for_layers.items())
    fixed = Fixed(
        **once,  # type: ignore[arg-type]
        strategy=model_pins,
        layers=(*layer_pins, *pinned_by_name),
        forbidden=forbidden,
    )
    return Pins(fixed, **others, delay=delay, notes=_unoffered(layer_pins, graph))  # type: ignore[arg-type]


def _delay(once: dict[str, object]) -> Delay | None:
    """The pins of delayed gradients, taken out of those that are chosen once."""
    schedule = cast("Schedule | None", once.get("schedule"))
    delayed = schedule is not None and not schedule.executable
    if delayed:
        del once["schedule"]
    rule, setting = once.pop("rule", None), once.pop("setting", None)
    if delayed or rule is not None or setting is not None:
        return Delay(rule, setting, only=True)  # type: ignore[arg-type]
    return None


def _narrowest(for_layers: dict[tuple[str, str], object], graph: ModelGraph) -> dict[tuple[str, str], object]:
    """Pins of layers such that no two contradict one another: of each layer, the one that names fewest layers holds."""
    names = [layer.name for layer in graph.layers]
    matching = {layers: [name for name in names if fnmatchcase(name, layers)] for layers, _ in for_layers}
    values = dict[tuple[str, str], object]()
    for (layers, field_name), value in for_layers.items():
        rivals = [
            (other, rival) for (other, name), rival in for_layers.items() if name == field_name and rival != value
        ]
        narrower = [matching[other] for other, _ in rivals if len(matching[other]) < len(matching[layers])]
        left = [name for name in matching[layers] if not any(name in others for others in narrower)]
        for other, rival in rivals:
            if len(matching[other]) == len(matching[layers]) and set(left) & set(matching[other]):
                typed = typed_name(field_name)
                remedy = f"--fix {other}.{typed}={_shown(rival)} asks for another of the same layer; lift one of them."
                raise InputError("--fix", f"{layers}.{typed}={_shown(value)}", remedy)
        patterns = [layers] if left == matching[layers] else left
        values |= {(pattern, field_name): value for pattern in patterns}
    return values


def _read(pin_text: str, graph: ModelGraph) -> tuple[str | None, PinName, object]:
    """The layers (None: all), the pin and the value of a text."""
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
        remedy = f"{suggestion(layers, names)} Layers of {graph.name}: {_few(names)}.".lstrip()
        raise InputError("--fix", pin_text, remedy)
    return layers, pin, value


def _offered(
    for_all: dict[str, object], for_layers: Mapping[tuple[str, str], object], graph: ModelGraph
) -> tuple[tuple[tuple[str, object], ...], tuple[LayerPin, ...]]:
    """Pins of every layer as those that all layers offer, and those of the layers that do.

    An embedding has no experts and nothing to recompute: ``recompute=full`` means the layers that can be. Pins of some
    layers (``for_layers``) replace them there.
    """
    model_pins, layer_pins = list[tuple[str, object]](), list[LayerPin]()
    for field_name, value in for_all.items():
        offered = {
            kind: _values(graph.kinds[kind], field_name, value) for kind in {layer.kind for layer in graph.layers}
        }
        able = [layer.name for layer in graph.layers if value in offered[layer.kind]]
        # layers that share parameters have one strategy, those around the blocks one layout: a pin holds for all
        # or for none of them
        tied = [{graph.layers[place].name for place in group} for group in tied_groups(graph)]
        if any(pin.field == field_name and pin.splits for pin in pin_names()):
            tied.append({layer.name for layer in graph.layers if layer.role is not Role.BLOCK})
        for group in tied:
            able = able if group <= {*able} else [name for name in able if name not in group] or able
        if not able:
            raise _offered_nowhere(graph, field_name, value, {other for values in offered.values() for other in values})
        replaced = [layers for layers, name in for_layers if name == field_name]
        able = [name for name in able if not any(fnmatchcase(name, layers) for layers in replaced)]
        if len(able) == len(graph.layers):
            model_pins.append((field_name, value))
        else:
            layer_pins += [(name, field_name, value) for name in able]
    return tuple(model_pins), tuple(layer_pins)


def _offered_nowhere(graph: ModelGraph, field_name: str, value: object, offered: set[object]) -> InputError:
    """The error for a value that no layer offers; ``offered``: those that some layer does."""
    others = {str(_shown(other)) for other in offered - {getattr(Strategy(), field_name, None)}}
    only = f", only {', '.join(sorted(others, key=lambda text: (len(text), text)))}" if others else ""
    dimensions = [dimension for dimension in choosing() if field_name in fields_of(dimension.name)]
    blocks = [layer for layer in graph.layers if layer.role is Role.BLOCK]
    kinds = [replace(graph.kind_of(layer), name=layer.name) for layer in blocks]
    reason = next((why for kind in kinds for dimension in dimensions if (why := dimension.reason(kind))), "")
    remedy = f"No layer of {graph.name} offers it{only}. {reason}".rstrip()
    return InputError(f"--fix {typed_name(field_name)}", str(_shown(value)), remedy)


def _unoffered(layer_pins: Sequence[LayerPin], graph: ModelGraph) -> tuple[str, ...]:
    """Lines on pins of all layers that some blocks do not offer."""
    lines = []
    for field_name, value in dict.fromkeys((field_name, value) for _, field_name, value in layer_pins):
        able = {layer for layer, name, pinned in layer_pins if (name, pinned) == (field_name, value)}
        unable = [layer.name for layer in graph.layers if layer.role is Role.BLOCK and layer.name not in able]
        if unable:
            pin = f"--fix {typed_name(field_name)}={_shown(value)}"
            lines.append(f"{pin} is not possible for {_few(unable)}, and holds for the other layers")
    return tuple(lines)


def _values(kind: LayerKind, field_name: str, value: object) -> set[object]:
    """What a kind of layer offers of a field of ``Strategy``, on as many devices as the value may need."""
    if field_name not in (*Strategy.__slots__, *ADDED):
        return {value}
    devices = _MANY * value if isinstance(value, int) and value > 1 else _MANY
    choices = (choice for dimension in choosing() for choice in dimension.choices(kind, devices))
    return {choice[field_name] for choice in choices if field_name in choice}


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])}, …, {', '.join(names[-2:])}"


def _put(pins: dict[str, object] | dict[tuple[str, str], object], key: object, value: object, text: str) -> None:
    table: dict[object, object] = pins  # type: ignore[assignment]
    if table.setdefault(key, value) != value:
        raise InputError("--fix", text, f"It is also fixed to {table[key]}, or forbidden: give one of them.")
