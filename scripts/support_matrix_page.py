"""The table of ``docs/support.md``, from ``docs/data/support.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from docs_scores import replaced

from galvatron_lite.files import read_data, write_text
from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph, Role
from galvatron_lite.parallelism.context.cost import attention_of
from galvatron_lite.parallelism.registry import dimensions
from galvatron_lite.parallelism.spatial.grids import splits_pixels
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage
from galvatron_lite.plans.written import parse_strategy
from galvatron_lite.search.space import strategies_for

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "data" / "support.json"
PAGE = ROOT / "docs" / "support.md"

NOT_RUN = "not run yet"
SIGNS = {
    "works": "yes",
    "falls back": "partly",
    "no": "no",
    "wrong": "**wrong**",
    "crashes": "**crashes**",
    "not known": "?",
}


def table(data: Mapping[str, Any]) -> str:
    """A row a family, a column a way, and below why what does not run does not."""
    rows = {name: row for name, row in data["families"].items() if "ways" in row}
    heads = [way.name for way in WAYS]
    lines = ["| family | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    lines += [
        f"| {name} | " + " | ".join(cell(row["ways"].get(head)) for head in heads) + " |" for name, row in rows.items()
    ]
    return "\n".join([caption(data, len(rows)), "", *lines])


def caption(data: Mapping[str, Any], count: int) -> str:
    """What was run, and when."""
    of = data["measured"]
    days = sorted({row["date"] for row in data["families"].values() if "ways" in row})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"{count} families, measured here {when}: torch {of['torch']}, transformers {of['transformers']}, Python "
        f"{of['python']}, two gloo processes (auto4: four)."
    )


def cell(found: Mapping[str, Any] | None) -> str:
    """The state of a way; nothing where the model has nothing to try it on."""
    if found is None:
        return ""
    sign = SIGNS[found["state"]]
    sign = f"{sign}*" if found["state"] == "works" and found["why"] else sign
    return f"{sign} {found['error']:.0e}" if found.get("error") is not None else sign


def reasons(data: Mapping[str, Any]) -> str:
    """Every reason once, with the families and ways that it is of."""
    said: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, row in data["families"].items():
        for way, found in row.get("ways", {}).items():
            if found["why"]:
                said.setdefault((found["state"], found["why"]), {}).setdefault(name, []).append(way)
    order = list(SIGNS)
    lines = ["| families | ways | | why, as the message says it |", "|---|---|---|---|"]
    for (state, why), of in sorted(said.items(), key=lambda item: -order.index(item[0][0])):
        ways = sorted({way for own in of.values() for way in own}, key=[way.name for way in WAYS].index)
        sign = "yes*" if state == "works" else SIGNS[state]
        lines.append(f"| {', '.join(of)} | {', '.join(ways)} | {sign} | {plain(why)} |")
    return "\n".join(lines)


def untried(data: Mapping[str, Any]) -> str:
    """Families that cannot be tried, and why."""
    rows = {name: row for name, row in data["families"].items() if "ways" not in row}
    if not rows:
        return "None."
    lines = ["| family | why |", "|---|---|"]
    return "\n".join(
        [
            *lines,
            *(
                f"| {name} | {plain(row.get('refused') or row.get('failed') or 'not run yet')} |"
                for name, row in rows.items()
            ),
        ]
    )


def plain(text: str) -> str:
    """Text that a cell of a table can hold."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("`", "'")


PARTS: Sequence[tuple[str, Any]] = (("support", table), ("reasons", reasons), ("untried", untried))
"""Markers of the page, and what is written between them."""


def page_of(text: str, data: Mapping[str, Any]) -> str:
    """The page with what the data says."""
    for name, make in PARTS:
        text = replaced(text, name, make(data))
    return text


def write_page() -> None:
    """Write the tables into the page."""
    write_text(PAGE, page_of(PAGE.read_text(encoding="utf-8"), read_data(DATA)))


RANKS, SAMPLES = 2, 8
ALIKE = Strategy(data=RANKS)  # what a layer does that cannot do what is tried


@dataclass(frozen=True)
class Way:
    """One way to train on two processes."""

    name: str  # heads its column
    strategy: str  # of every layer, in short form
    dimension: str = ""  # whose reason is told where no layer offers it
    needs: str = ""  # what a model must have for it: "", "attention", "experts" or "pixels"
    schedule: Schedule | None = None  # of two pipeline stages or more; None: one stage
    virtual: int = 1  # stages of each process
    options: Mapping[str, Any] = field(default_factory=dict)  # of ``ParallelModel``
    # of ``auto_parallelize(model, batch, mem=...)``, which chooses the strategies; 0: those of ``strategy``
    ranks: int = 0


WAYS = (
    Way("data", "data2"),
    Way("zero1", "zero1x2"),
    Way("zero2", "zero2x2"),
    Way("zero3", "zero3x2"),
    Way("tensor", "tensor2", "tensor"),
    Way("tensor+sp", "tensor2+sp", "tensor"),
    Way("context", "context2", "context", "attention"),
    Way("ulysses", "ulysses2", "context", "attention"),
    Way("expert", "data2 expert2", "expert", "experts"),
    Way("1f1b", "whole", schedule=Schedule.ONE_F_ONE_B),
    Way("interleaved", "whole", schedule=Schedule.INTERLEAVED, virtual=2),
    Way("zb-1p", "whole", schedule=Schedule.ZERO_BUBBLE_1P),
    Way("zb-v", "whole", schedule=Schedule.ZERO_BUBBLE_V, virtual=2),
    Way("recompute", "data2 recompute", "recompute"),
    Way("selective", "data2 selective", "recompute"),
    Way("offload", "data2 offload"),
    Way("spatial", "spatial1x2", "spatial", "pixels"),
    Way("filters", "filters2", "channels", "pixels"),
    Way("channels", "channels2", "channels", "pixels"),
    Way("bf16", "data2", options={"precision": "bf16"}),
    Way("auto", "", ranks=2),
    Way("auto4", "", ranks=4),
    Way("compile", "data2", options={"compile": "aot_eager"}),
)


@dataclass(frozen=True)
class Asked:
    """What is tried of a way."""

    plan: Plan | None  # for two processes; None where the model has nothing to try it on
    kept: tuple[str, ...] = ()  # layers that do something else, as they do not offer it
    reason: str = ""  # why they do not; or why there is no plan
    forced: bool = False  # whether no layer offers it, and all are made to try


def ask(way: Way, graph: ModelGraph) -> Asked:
    """The plan of a way for a model: layers that offer it take it, the others share the samples."""
    kinds = [graph.kind_of(layer) for layer in graph.layers]
    if not _has(way.needs, kinds):
        return Asked(None)
    if way.schedule is not None:
        return _pipeline(way, way.schedule, graph)
    wanted = parse_strategy(way.strategy)
    chosen = {layer.name: wanted if _offers(graph.kind_of(layer), wanted) else ALIKE for layer in graph.layers}
    judged = [layer for layer in graph.layers if layer.role is Role.BLOCK and _counts(way, graph.kind_of(layer))]
    judged = judged or list(graph.layers)
    kept = tuple(layer.name for layer in judged if chosen[layer.name] != wanted)
    reason = "; ".join(dict.fromkeys(_reasons(way, [graph.kind_of(layer) for layer in judged if layer.name in kept])))
    forced = len(kept) == len(judged)
    chosen |= {layer.name: wanted for layer in judged if forced}
    return Asked(_one_stage(graph, _edges_alike(graph, chosen)), kept, reason, forced)


def _has(needs: str, kinds: list[LayerKind]) -> bool:
    """Whether a model has what a way is for."""
    if needs == "experts":
        return any(kind.expert_parameters or kind.expert_reason for kind in kinds)
    if needs == "pixels":
        return any(splits_pixels(kind) for kind in kinds)
    return needs != "attention" or any(attention_of(kind) for kind in kinds)


def _counts(way: Way, kind: LayerKind) -> bool:
    """Whether a block is one that a way is for: dense blocks beside mixtures spread no experts."""
    return way.needs != "experts" or bool(kind.expert_parameters or kind.expert_reason)


def _offers(kind: LayerKind, wanted: Strategy) -> bool:
    return wanted in strategies_for(kind, RANKS)


def _reasons(way: Way, kinds: list[LayerKind]) -> Iterator[str]:
    for dimension in dimensions():
        if dimension.name == way.dimension or (dimension.name == "channel" and way.dimension == "channels"):
            yield from (said for kind in kinds if (said := dimension.reason(kind)))


def _edges_alike(graph: ModelGraph, chosen: Mapping[str, Strategy]) -> dict[str, Strategy]:
    """What is read and what is given is laid out alike; layers that share parameters do the same."""
    first, last = graph.layers[0].name, graph.layers[-1].name
    edges = {first, last, *(name for tie in graph.ties for name in (tie.first, tie.second))}
    alike = len({chosen[name] for name in edges}) == 1
    return dict(chosen) if alike else {**chosen, **dict.fromkeys(edges, ALIKE)}


def _one_stage(graph: ModelGraph, chosen: Mapping[str, Strategy]) -> Plan:
    return _written(graph, [Stage(tuple(_run(layer, chosen[layer.name]) for layer in graph.layers))])


def _pipeline(way: Way, schedule: Schedule, graph: ModelGraph) -> Asked:
    """Stages of about as many layers each."""
    count, layers = RANKS * way.virtual, len(graph.layers)
    if graph.whole:
        return Asked(None, reason=graph.whole)
    if layers < count:
        return Asked(None, reason=f"the model has {layers} layers, fewer than {count} stages")
    cuts = [round(layers * number / count) for number in range(count + 1)]
    parts = [graph.layers[start:stop] for start, stop in pairwise(cuts)]
    stages = [Stage(tuple(_run(layer, parse_strategy(way.strategy)) for layer in part)) for part in parts]
    plan = _written(graph, stages)
    return Asked(replace(plan, schedule=schedule, virtual_stages=way.virtual, microbatches=4))


def _run(layer: Layer, strategy: Strategy) -> LayerRun:
    return LayerRun(layer.name, layer.name, 1, strategy)


def _written(graph: ModelGraph, stages: list[Stage]) -> Plan:
    return Plan(PLAN_VERSION, graph.name, RANKS, SAMPLES, 1, Schedule.ONE_F_ONE_B, "fp32", tuple(stages))
