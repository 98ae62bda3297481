"""Answers requests to ``galvatron oracle``: reads models, clusters, numbers of devices and methods, and forecasts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from galvatron_lite.api_profile import precision_on
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.errors import InputError, unknown
from galvatron_lite.files import read_data, read_value
from galvatron_lite.folders import profile_folder
from galvatron_lite.limits import DEVICES, LARGEST, check_range
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes import load_model, load_shape, model_names
from galvatron_lite.model.shapes.fields import not_square, sides_of, sizes_of
from galvatron_lite.model.shapes.images.names import canonical, graph_of_name
from galvatron_lite.oracle import pricing
from galvatron_lite.oracle.closed_form import KINDS, Case, closed_forecast, quirks_named
from galvatron_lite.oracle.layers import Fabric, Network, cluster_links, fabric_links, network_of
from galvatron_lite.oracle.pricing import can_split, cluster_costs, price_row
from galvatron_lite.oracle.rows import Forecast, Method, RowQuestion
from galvatron_lite.oracle.strategies import check_strategy
from galvatron_lite.plans.written import parse_strategy

SIDE = 224  # default pixels of a picture's side


def graph_named(name: str, precision: str, image: str | None = None) -> ModelGraph:
    """Return the planner's model by name or file: a shipped one, or an image network by its published name."""
    if Path(name).suffix in (".yaml", ".yml", ".json") or name in model_names():
        sizes = sizes_of(load_shape(name), name, image) if image else None
        return load_model(name, overrides=sizes, precision=precision)
    height, width = sides_of(image) if image else (SIDE, SIDE)
    graph = graph_of_name(canonical(name), height, precision)
    if graph is None:
        names = ", ".join(model_names())
        remedy = f"Shipped models: {names}; image networks by name, such as vgg16, resnet152, regnety_032; or a file."
        raise InputError("model", name, remedy)
    if height != width:
        raise not_square(name, image or "")
    return graph


def network_names() -> tuple[str, ...]:
    """Return the names of the networks with a table of layers."""
    return tuple(sorted(path.stem for path in (profile_folder("paradl") / "models").glob("*.yaml")))


def network_named(name_or_path: str) -> Network:
    """Return a table of layers by name (``resnet50``) or from a file."""
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml", ".json"):
        return read_value(Network, path)
    names = network_names()
    if name_or_path not in names:
        raise unknown("model", name_or_path, names)
    return _shipped_network(name_or_path)


@cache
def _shipped_network(name: str) -> Network:
    return read_value(Network, profile_folder("paradl") / "models" / f"{name}.yaml")


@cache
def fabric_named(name: str) -> Fabric | None:
    """Return the links of a cluster for the closed forms by its name; None if no file describes them."""
    path = profile_folder("paradl") / "networks" / f"{name}.yaml"
    return read_value(Fabric, path) if path.is_file() else None


FORMULAS = ("galvatron", "paradl")
DEFAULT_METHODS = tuple(kind for kind in KINDS if kind is not Method.LAYER)
"""Methods of a forecast by default."""
SAMPLES, BATCH = 1_280_000, 32
"""Default samples of an epoch (ImageNet, as the paper counts it) and of a replica."""
_RANGE = re.compile(r"^(\d+)\.\.(\d+)$")


@dataclass(frozen=True, slots=True)
class OracleOptions:
    """Options of a forecast besides the model and the cluster."""

    counts: tuple[int, ...]  # numbers of devices
    formulas: str = "galvatron"  # ``galvatron`` or ``paradl``
    strategies: tuple[str, ...] = ()  # names of methods; none: ``DEFAULT_METHODS``
    texts: tuple[str, ...] = ()  # strategies in full, for formulas ``galvatron``
    batch: int | None = None  # samples of a replica
    samples: int | None = None  # samples of an epoch
    group: int = 0  # devices of a group of a hybrid; 0: a node
    segments: int = 0  # micro-batches of a pipeline
    precision: str | None = None  # precision of compute, for formulas ``galvatron``
    image: str | None = None  # pixels of a picture, for models of the planner
    network: str | None = None  # setting of the links, for the closed forms
    quirks: tuple[str, ...] = ()  # names of quirks, for the closed forms
    contention: bool = True  # whether flows share links, for the closed forms


def counts_of(text: str) -> tuple[int, ...]:
    """Parse numbers of devices: ``64``, ``4,8,12``, or ``1..1024``, which doubles and includes its end."""
    counts: list[int] = []
    for part in text.replace(" ", "").split(","):
        if match := _RANGE.match(part):
            low, high = int(match[1]), int(match[2])
            counts += [low * 2**power for power in range(high.bit_length()) if low and low * 2**power <= high]
            counts += [high] if 0 < low <= high else []
        elif part.isdecimal() and int(part):
            counts.append(int(part))
    if not counts or not all(_RANGE.match(part) or part.isdecimal() for part in text.replace(" ", "").split(",")):
        raise InputError("--gpus", text, "Give a number, several (4,8,12) or a range that doubles (1..1024).")
    return tuple(sorted(set(counts)))


def methods_named(names: Sequence[str]) -> tuple[Method, ...]:
    """Return methods by name; ``DEFAULT_METHODS`` without names."""
    methods = {kind.value: kind for kind in Method}
    for name in names:
        if name not in methods:
            raise InputError("--strategies", name, f"Give some of {', '.join(methods)}; --strategy takes any other.")
    return tuple(methods[name] for name in dict.fromkeys(names)) or DEFAULT_METHODS


def forecast(model: str, cluster: str, options: OracleOptions) -> Forecast:
    """Return the forecast of a model on a cluster.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    _check(options)
    return (
        _closed_form_forecast(model, cluster, options)
        if options.formulas == "paradl"
        else _priced_forecast(model, cluster, options)
    )


def _check(options: OracleOptions) -> None:
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
        if number:
            check_range(name, number, DEVICES)


def _closed_form_forecast(model: str, cluster: str, options: OracleOptions) -> Forecast:
    network = _layer_table(model, cluster, options)
    fabric = fabric_named(cluster)
    if fabric is not None:
        wires = fabric_links(fabric, options.network)
    else:
        wires = cluster_links(load_cluster(cluster, max(options.counts)), options.network)
    case = Case(
        Method.SERIAL, 1, options.batch or network.batch, network.samples, options.group or wires.node,
        options.segments, network=network, wires=wires, contention=options.contention,
        quirks=quirks_named(options.quirks),
    )  # fmt: skip
    return closed_forecast(case, methods_named(options.strategies), options.counts)


def _layer_table(model: str, cluster: str, options: OracleOptions) -> Network:
    """Return the table of layers: a shipped one, one from a file, or one made from the planner's model."""
    shipped = model in network_names() and options.image is None
    if shipped or (model.endswith((".yaml", ".yml", ".json")) and _holds_layers(model)):
        network = network_named(model)
        return network if options.samples is None else replace(network, samples=options.samples)
    samples, batch = options.samples or SAMPLES, options.batch or BATCH
    model_costs = cluster_costs(graph_named(model, "fp32", options.image), cluster, 1, "fp32", batch)
    row = price_row(model_costs, RowQuestion(Method.SERIAL, 1, batch, samples))
    source = f"{model_costs.profile.origin.source}, {batch} samples at a time, by the planner's cost model"
    return network_of(model_costs.graph, row.compute / samples, source, samples, batch)


def _holds_layers(path: str) -> bool:
    """Whether a file is a table of layers rather than a model of the planner."""
    data = read_data(Path(path))
    return isinstance(data, dict) and "seconds_source" in data


def _priced_forecast(model: str, cluster: str, options: OracleOptions) -> Forecast:
    kinds = methods_named(options.strategies) if options.strategies or not options.texts else ()
    strategies = tuple(parse_strategy(text, "--strategy") for text in options.texts)
    shipped = network_named(model) if model in network_names() else None
    batch = options.batch or (shipped.batch if shipped else BATCH)
    samples = options.samples or (shipped.samples if shipped else SAMPLES)
    most = max(options.counts)
    precision = precision_on(cluster, options.precision, most)
    graph = graph_named(shipped.graph if shipped else model, precision, options.image)
    for strategy in strategies:
        check_strategy(strategy, graph.kinds)
        unit = strategy.devices
        if all(count % unit for count in options.counts):
            counts = ", ".join(f"{count:,}" for count in options.counts)
            raise InputError("--gpus", counts, f"{strategy} takes {unit:,} devices or a multiple: give --gpus {unit}.")
    model_costs = cluster_costs(graph, cluster, most, precision, batch)
    for kind in kinds if options.strategies else ():
        if not can_split(model_costs, kind):
            words = ", ".join(method.value for method in DEFAULT_METHODS if can_split(model_costs, method))
            remedy = f"No layer of {graph.name} can be split so; it allows {words}, and --strategy any other."
            raise InputError("--strategies", kind.value, remedy)
    node = model_costs.profile.cluster.levels[0].size
    question = RowQuestion(Method.SERIAL, 1, batch, samples, options.group or node, options.segments)
    return pricing.forecast(model_costs, question, kinds, strategies, options.counts)
