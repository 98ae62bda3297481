"""What ``galvatron oracle`` is asked: numbers of devices, strategies, and the forecast they make. No torch here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from galvatron_lite.errors import InputError
from galvatron_lite.files import read_data
from galvatron_lite.limits import LARGEST, check_range
from galvatron_lite.oracle import closed, table
from galvatron_lite.oracle.case import Case, Kind
from galvatron_lite.oracle.chosen import check_text
from galvatron_lite.oracle.derived import network_of
from galvatron_lite.oracle.layers import Network
from galvatron_lite.oracle.machine import Machine, machine_of
from galvatron_lite.oracle.models import graph_named
from galvatron_lite.oracle.network import Wires, wires_of, wires_of_cluster
from galvatron_lite.oracle.priced import row_of
from galvatron_lite.oracle.question import Question
from galvatron_lite.oracle.quirks import quirks_named
from galvatron_lite.oracle.rows import Forecast
from galvatron_lite.oracle.shipped import fabric_named, network_named, network_names
from galvatron_lite.parallelism.strategy import Strategy

FORMULAS = ("galvatron", "paradl")
WORDS = tuple(kind for kind in closed.KINDS if kind is not Kind.LAYER)
"""Strategies that are told where none are asked for."""
SAMPLES, BATCH = 1_280_000, 32
"""Samples of an epoch (ImageNet, as the paper counts it) and of a replica, where nothing else is said."""
_RANGE = re.compile(r"^(\d+)\.\.(\d+)$")


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that can be asked for beside the model and the cluster.

    Attributes:
        counts: numbers of devices.
        formulas: ``galvatron`` or ``paradl``.
        strategies: the oracle's words; none: ``WORDS``.
        texts: strategies in full, of the default formulas only.
        batch: samples of a replica.
        samples: of an epoch.
        group: devices of a group of a hybrid; 0: of a node.
        segments: of a pipeline.
        precision: of compute, of the default formulas.
        image: pixels of a picture, of models of the planner.
        network: setting of the links, of the closed forms.
        quirks: of the closed forms.
        contention: of the closed forms.
    """

    counts: tuple[int, ...]
    formulas: str = "galvatron"
    strategies: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    batch: int | None = None
    samples: int | None = None
    group: int = 0
    segments: int = 0
    precision: str | None = None
    image: str | None = None
    network: str | None = None
    quirks: tuple[str, ...] = ()
    contention: bool = True


def counts_of(text: str) -> tuple[int, ...]:
    """Numbers of devices: ``64``, ``4,8,12``, or ``1..1024``, which goes on by doubling, to its end.

    Raises:
        InputError: no such list.
    """
    counts: list[int] = []
    for part in text.replace(" ", "").split(","):
        if found := _RANGE.match(part):
            low, high = int(found[1]), int(found[2])
            counts += [low * 2**power for power in range(high.bit_length()) if low and low * 2**power <= high]
            counts += [high] if 0 < low <= high else []
        elif part.isdecimal() and int(part):
            counts.append(int(part))
    if not counts or not all(_RANGE.match(part) or part.isdecimal() for part in text.replace(" ", "").split(",")):
        raise InputError("--gpus", text, "Give a number, several (4,8,12) or a range that doubles (1..1024).")
    return tuple(sorted(set(counts)))


def kinds_of(names: Sequence[str]) -> tuple[Kind, ...]:
    """The oracle's words.

    Raises:
        InputError: an unknown one.
    """
    known = {kind.value: kind for kind in Kind}
    for name in names:
        if name not in known:
            raise InputError("--strategies", name, f"Give some of {', '.join(known)}; --strategy takes any other.")
    return tuple(known[name] for name in dict.fromkeys(names)) or WORDS


def forecast(model: str, cluster: str, options: Options) -> Forecast:
    """The table that is asked for.

    Raises:
        InputError: an unknown model, cluster, strategy or option, or more devices than there are.
    """
    _check(options)
    return _closed(model, cluster, options) if options.formulas == "paradl" else _priced(model, cluster, options)


def _check(options: Options) -> None:
    """Whether the options go together.

    Raises:
        InputError: an option of the other formulas, or a number below 1.
    """
    if options.formulas not in FORMULAS:
        raise InputError("--formulas", options.formulas, f"Give {' or '.join(FORMULAS)}.")
    closed_only = {"--network": options.network, "--quirk": options.quirks, "--no-contention": not options.contention}
    priced_only = {"--strategy": options.texts, "--precision": options.precision}
    other, needs = (priced_only, "galvatron (the default)") if options.formulas == "paradl" else (closed_only, "paradl")
    for name, value in other.items():
        if value:
            shown = ", ".join(value) if isinstance(value, tuple) else value
            raise InputError(name, shown, f"It goes with --formulas {needs}.")
    for name, number in (("--batch", options.batch), ("--samples", options.samples)):
        if number is not None:
            check_range(name, number, LARGEST)
    for name, number in (("--group", options.group), ("--segments", options.segments)):
        if number < 0:
            raise InputError(name, number, "Give 1 or more.")


def _closed(model: str, cluster: str, options: Options) -> Forecast:
    network = _network(model, cluster, options)
    wires = _wires(cluster, options)
    case = Case(
        network, wires, Kind.SERIAL, 1, options.batch or network.batch, options.group or wires.node, options.segments,
        options.contention, quirks_named(options.quirks),
    )  # fmt: skip
    return closed.forecast(closed.Asked(case, kinds_of(options.strategies), options.counts))


def _wires(cluster: str, options: Options) -> Wires:
    from galvatron_lite.cluster.catalog import load_cluster

    fabric = fabric_named(cluster)
    if fabric is not None:
        return wires_of(fabric, options.network)
    return wires_of_cluster(load_cluster(cluster, max(options.counts)), options.network)


def _network(model: str, cluster: str, options: Options) -> Network:
    """The table of layers: a shipped one, a file's, or made from the planner's model.

    Raises:
        InputError: no such model, or none that the closed forms know.
    """
    named = model in network_names() and options.image is None
    if named or (model.endswith((".yaml", ".yml", ".json")) and _holds_layers(model)):
        found = network_named(model)
        return found if options.samples is None else replace(found, samples=options.samples)
    samples, batch = options.samples or SAMPLES, options.batch or BATCH
    machine = machine_of(graph_named(model, "fp32", options.image), cluster, 1, "fp32", batch)
    row = row_of(machine, Question(Kind.SERIAL, 1, batch, samples))
    source = f"{machine.profile.origin.source}, {batch} samples at a time, by the planner's cost model"
    return network_of(machine.graph, row.compute / samples, source, samples, batch)


def _holds_layers(path: str) -> bool:
    """Whether a file is a table of layers, not a model of the planner."""
    data = read_data(Path(path))
    return isinstance(data, dict) and "seconds_source" in data


def _priced(model: str, cluster: str, options: Options) -> Forecast:
    from galvatron_lite.api_profile import precision_on
    from galvatron_lite.plans.strategy_text import parse_strategy

    kinds = kinds_of(options.strategies) if options.strategies or not options.texts else ()
    strategies = tuple(parse_strategy(text, "--strategy") for text in options.texts)
    known = network_named(model) if model in network_names() else None
    batch = options.batch or (known.batch if known else BATCH)
    samples = options.samples or (known.samples if known else SAMPLES)
    most = max(options.counts)
    precision = precision_on(cluster, options.precision, most)
    graph = graph_named(known.graph if known else model, precision, options.image)
    for one in strategies:
        check_text(one, graph.kinds)
        _check_devices(one, options.counts)
    machine = machine_of(graph, cluster, most, precision, batch)
    _check_words(machine, kinds if options.strategies else ())
    question = Question(Kind.SERIAL, 1, batch, samples, options.group or _node(machine), options.segments)
    return table.forecast(machine, table.Wanted(question, kinds, strategies, options.counts))


def _check_devices(strategy: Strategy, counts: Sequence[int]) -> None:
    """Whether a strategy can be had on any of the numbers of devices.

    Raises:
        InputError: none of them is a multiple of what it takes.
    """
    unit = strategy.devices
    if all(count % unit for count in counts):
        asked = ", ".join(f"{count:,}" for count in counts)
        raise InputError("--gpus", asked, f"{strategy} takes {unit:,} devices or a multiple: give --gpus {unit}.")


def _check_words(machine: Machine, kinds: Sequence[Kind]) -> None:
    """Whether the model allows what was asked for by name.

    Raises:
        InputError: a word that it does not.
    """
    for kind in kinds:
        if not table.allows(machine, kind):
            known = ", ".join(word.value for word in WORDS if table.allows(machine, word))
            remedy = f"No layer of {machine.graph.name} can be split so; it allows {known}, and --strategy any other."
            raise InputError("--strategies", kind.value, remedy)


def _node(machine: Machine) -> int:
    """Devices of a node."""
    return machine.profile.cluster.levels[0].size
