"""What a user pins (``pp=4``, ``layers.3.recompute=full``) or forbids (``tp``), read and checked.

A pin is ``NAME=VALUE`` for the whole plan, or ``LAYERS.NAME=VALUE`` for some layers: the name of one, or a pattern with
``*`` and ``?`` (``layers.*.tensor=2``). Names are those of ``pin_names``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod

from galvatron_lite.cost.sharing import tied_groups
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, ModelGraph, Role
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.registry import CHOSEN
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.search.pin_names import NAMES, PinName, dimensions_named, near, pin_named, typed_name
from galvatron_lite.search.space import STRATEGY_FIELDS, Fixed
from galvatron_lite.search.ways import Delay


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
            said = (("setting", self.delay.setting), ("rule", self.delay.rule))
            name, value = next(((name, own.value) for name, own in said if own is not None), ("schedule", "cyclic"))
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
            near_by = " or ".join(str(d) for d in _around(divisors(batch), samples))
            raise InputError(
                "--fix microbatch", samples, f"It must divide the batch of {batch} samples; the nearest: {near_by}."
            )
        return replace(self.fixed, microbatches=batch // samples)

    def _samples(self, devices: int) -> int | None:
        """Samples of a micro-batch over all devices of a stage."""
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
        off = {name for dimension in self.fixed.forbidden for name in STRATEGY_FIELDS.get(dimension, ())}
        degrees = [1 if name in off else known.get(name) for name in ("tensor", "context")]
        if self.fixed.pipeline is None or None in degrees:
            return None
        return devices // prod([self.fixed.pipeline, *(int(str(degree)) for degree in degrees)])

    def _check_degrees(self, devices: int) -> None:
        """Degrees that are pinned for one layer, and those for all, must multiply to a divisor of the devices."""
        splitting = {pin.field: pin.name for pin in NAMES if pin.splits}
        degrees = {splitting[name]: int(str(value)) for name, value in self.fixed.strategy if name in splitting}
        if self.fixed.pipeline is not None:
            degrees = {"pipeline": self.fixed.pipeline, **degrees}
        some = {(splitting[name], int(str(value))) for _, name, value in self.fixed.layers if name in splitting}
        for known in (degrees, *(degrees | {name: value} for name, value in sorted(some))):
            if devices % prod(known.values()):
                said = " ".join(f"--fix {name}={value}" for name, value in known.items())
                raise InputError(
                    said.partition("=")[0] if len(known) == 1 else said, prod(known.values()),
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
    forbidden = tuple(dict.fromkeys(name for given in forbid for name in dimensions_named(given)))
    once: dict[str, object] = {"pipeline": 1} if "pipeline" in forbidden else {}
    every: dict[str, object] = {}
    some: dict[tuple[str, str], object] = {}
    for given in fix:
        layers, pin, value = _read(given, graph)
        if layers is not None:
            _put(some, (layers, pin.field), value, given)
        else:
            _put(once if pin.once else every, pin.field, value, given)
    some = _narrowest(some, graph)
    _check_forbidden(forbidden, [*every.items(), *((name, value) for (_, name), value in some.items())])
    _check_counts(once)
    own = {name: once.pop(name, None) for name in ("microbatch", "device_samples")}
    own["delay"] = _delay(once)
    whole, partly = _offered(every, some, graph)
    fixed = Fixed(
        **once,  # type: ignore[arg-type]
        strategy=whole,
        layers=(*partly, *((layers, name, value) for (layers, name), value in some.items())),
        forbidden=forbidden,
    )
    return Pins(fixed, **own, notes=_unoffered(partly, graph))  # type: ignore[arg-type]


def _delay(once: dict[str, object]) -> Delay | None:
    """What is pinned of delayed gradients, taken from the other pins."""
    cyclic = once.get("schedule") is Schedule.CYCLIC
    if cyclic:
        del once["schedule"]
    rule, setting = once.pop("rule", None), once.pop("setting", None)
    if not cyclic and rule is None and setting is None:
        return None
    return Delay(rule, setting, only=True)  # type: ignore[arg-type]


def _narrowest(some: dict[tuple[str, str], object], graph: ModelGraph) -> dict[tuple[str, str], object]:
    """Pins of layers such that no two say otherwise of one: the one that names fewer layers holds."""
    names = [layer.name for layer in graph.layers]
    meant = {layers: [one for one in names if fnmatchcase(one, layers)] for layers, _ in some}
    known = dict[tuple[str, str], object]()
    for (layers, field_name), value in some.items():
        rivals = [(other, said) for (other, name), said in some.items() if name == field_name and said != value]
        own = [one for one in meant[layers] if not any(_beats(meant, other, layers, one) for other, _ in rivals)]
        equal = [
            (other, said) for other, said in rivals
            if len(meant[other]) == len(meant[layers]) and set(own) & set(meant[other])
        ]  # fmt: skip
        if equal:
            typed = next(pin.name for pin in NAMES if pin.field == field_name)
            other, said = equal[0]
            raise InputError(
                "--fix", f"{layers}.{typed}={_shown(value)}",
                f"--fix {other}.{typed}={_shown(said)} asks for another of the same layer; lift one of them.",
            )  # fmt: skip
        kept = [layers] if own == meant[layers] else own
        known |= {(one, field_name): value for one in kept}
    return known


def _beats(meant: dict[str, list[str]], other: str, layers: str, one: str) -> bool:
    """Whether another pin names a layer too, and fewer of them."""
    return one in meant[other] and len(meant[other]) < len(meant[layers])


def _shown(value: object) -> object:
    return getattr(value, "value", value)


def _read(pin_text: str, graph: ModelGraph) -> tuple[str | None, PinName, object]:
    """The layers that one pin names (None: all), its name and its value."""
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
    if not any(fnmatchcase(one, layers) for one in names):
        raise InputError("--fix", pin_text, f"{near(layers, names)}Layers of {graph.name}: {_few(names)}.")
    return layers, pin, value


def _offered(
    every: dict[str, object], some: Mapping[tuple[str, str], object], graph: ModelGraph
) -> tuple[tuple[tuple[str, object], ...], tuple[tuple[str, str, object], ...]]:
    """Pins of every layer as those that all layers offer, and those of the layers that do.

    An embedding has no experts and nothing to recompute: ``recompute=full`` means the layers that can be. What is said
    of some layers (``some``) holds there instead.
    """
    whole, partly = list[tuple[str, object]](), list[tuple[str, str, object]]()
    for field_name, value in every.items():
        known = {kind: _values(graph.kinds[kind], field_name, value) for kind in {one.kind for one in graph.layers}}
        able = [layer.name for layer in graph.layers if value in known[layer.kind]]
        # layers that share parameters have one strategy, those around the blocks one layout: a pin holds for all
        # or for none of them
        tied = [{graph.layers[place].name for place in group} for group in tied_groups(graph)]
        if any(pin.field == field_name and pin.splits for pin in NAMES):
            tied.append({one.name for one in graph.layers if one.role is not Role.BLOCK})
        for group in tied:
            able = able if group <= {*able} else [name for name in able if name not in group] or able
        if not able:
            others = {one for values in known.values() for one in values} - {getattr(Strategy(), field_name, None)}
            offered = ", ".join(sorted((str(_shown(one)) for one in others), key=_by_length))
            owners = [one for one in CHOSEN if field_name in STRATEGY_FIELDS.get(one.name, ())]
            kinds = [graph.kinds[layer.kind] for layer in graph.layers if layer.role is Role.BLOCK]
            reason = next((why for kind in kinds for one in owners if (why := one.reason(kind))), "")
            remedy = f"No layer of {graph.name} offers it{f', only {offered}' if offered else ''}. {reason}".rstrip()
            raise InputError(f"--fix {typed_name(field_name)}", str(_shown(value)), remedy)
        apart = [layers for layers, name in some if name == field_name]
        able = [name for name in able if not any(fnmatchcase(name, layers) for layers in apart)]
        if len(able) == len(graph.layers):
            whole.append((field_name, value))
        else:
            partly += [(name, field_name, value) for name in able]
    return tuple(whole), tuple(partly)


def _unoffered(partly: Sequence[tuple[str, str, object]], graph: ModelGraph) -> tuple[str, ...]:
    """Of pins that not all layers offer, the blocks that do not."""
    lines = []
    for field_name, value in dict.fromkeys((field_name, value) for _, field_name, value in partly):
        able = {layer for layer, name, pinned in partly if (name, pinned) == (field_name, value)}
        unable = [one.name for one in graph.layers if one.role is Role.BLOCK and one.name not in able]
        if unable:
            name = next(pin.name for pin in NAMES if pin.field == field_name)
            lines.append(
                f"--fix {name}={_shown(value)} is not possible for {_few(unable)}, and holds for the other layers"
            )
    return tuple(lines)


def _values(kind: LayerKind, field_name: str, value: object) -> set[object]:
    """What a kind of layer offers of a field of ``Strategy``, on as many devices as the value may ask for."""
    if field_name not in Strategy.__slots__:
        return {value}
    devices = _MANY * value if isinstance(value, int) and value > 1 else _MANY
    choices = (choice for dimension in CHOSEN for choice in dimension.choices(kind, devices))
    return {choice[field_name] for choice in choices if field_name in choice}


_MANY = 64
"""Devices on which every dimension of a kind of layer has choices."""


def _by_length(text: str) -> tuple[int, str]:
    return len(text), text


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])}, …, {', '.join(names[-2:])}"


def _put(pins: dict[str, object] | dict[tuple[str, str], object], key: object, value: object, text: str) -> None:
    table: dict[object, object] = pins  # type: ignore[assignment]
    if table.setdefault(key, value) != value:
        raise InputError("--fix", text, f"It is also fixed to {table[key]}, or forbidden: give one of them.")


def _check_forbidden(forbidden: Sequence[str], pinned: Sequence[tuple[str, object]]) -> None:
    """A pin must not ask for what is forbidden."""
    plain = Strategy()
    for name, value in pinned:
        for dimension in forbidden:
            if name in STRATEGY_FIELDS.get(dimension, ()) and value != getattr(plain, name):
                raise InputError("--forbid", dimension, f"It is also fixed to {value}: give one of them.")


def _check_counts(once: dict[str, object]) -> None:
    """The micro-batches are told by one of three pins."""
    told = [pin.name for pin in NAMES if pin.field in once and pin.field in _COUNTED]
    if len(told) > 1:
        raise InputError("--fix", told[1], f"It says the same as {told[0]}: give one of them.")


_COUNTED = ("microbatches", "microbatch", "device_samples")


def _around(numbers: Sequence[int], wanted: int) -> list[int]:
    return sorted(sorted(numbers, key=lambda number: abs(number - wanted))[:2])
