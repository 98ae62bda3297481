"""Plan files as people write and edit them: keys, strategies in short form, runs of layers by range or glob.

    devices: 8
    global_batch: 64
    microbatches: 4
    runs:
    - {layers: embed, strategy: zero3x8}
    - {layers: layers.0..layers.31, strategy: zero3x8 recompute}
    - {layers: head, strategy: zero3x8}

``stages: [{runs: [...]}, ...]`` instead of ``runs`` for a pipeline. ``branches: [{name: left, first: 0, devices: 4,
runs: [...]}, ...]`` puts independent branches on devices of their own; ``runs`` then has the other layers, if any.
``layers`` is a name, a range, or a glob (``layers.*``), which takes the layers that match it one after the other from
where the run before ended. A whole plan file is one too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

from galvatron_lite.errors import FileFormatError, InputError, suggestion
from galvatron_lite.files import from_data, kind_of, to_data
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.branch.find import find_regions
from galvatron_lite.parallelism.pipeline.schedule import DELAYED_SCHEDULE
from galvatron_lite.parallelism.registry import UNSPLIT, fields_in, pinned
from galvatron_lite.parallelism.strategy import Strategy, strategy_of
from galvatron_lite.plans.io import check_plan
from galvatron_lite.plans.schema import DEFAULT_SCHEDULE, PLAN_VERSION, BranchPlacement, LayerRun, Plan, Stage

OTHER_WORDS = {
    "batch": "global_batch", "batch_size": "global_batch", "global_batch_size": "global_batch", "gpus": "devices",
    "world_size": "devices", "chunks": "microbatches", "gradient_accumulation": "microbatches",
    "tp": "tensor", "sp": "sequence_parallel", "cp": "context", "dp": "data", "ep": "expert",
}  # fmt: skip
"""What others call our keys."""
_KEYS: dict[type, set[str]] = {
    kind: {one.name for one in fields(kind)} for kind in (Plan, Stage, BranchPlacement, LayerRun, Strategy)
}
_PARTS = {"stages": Stage, "branches": BranchPlacement}
Data = Mapping[str, Any]


def parse_strategy(text: str, field: str = "strategy") -> Strategy:
    """A strategy from its short form (``zero3x8 tensor2+sp recompute``)."""
    chosen: dict[str, object] = {}
    for word in text.split():
        named = fields_in(word)
        if named is None or named.keys() & chosen.keys():
            raise InputError(field, word if named is None else text, _remedy())
        chosen |= named
    if not text.split():
        raise InputError(field, text, _remedy())
    return strategy_of(chosen)


def _remedy() -> str:
    examples = (one.examples or f"{one.degree}2" for one in pinned())
    return f"Write parts such as {', '.join(examples)}; or {UNSPLIT}."


def _check_keys(
    data: Data, keys: Collection[str], field: str, needed: Sequence[str] = (), lists: Collection[str] = ()
) -> None:
    """Whether a mapping has all keys that it needs and no others; ``field`` with what joins it to a key.

    Where a key is unknown, ``lists`` that hold a plain value are named too: their items may stand under that key.
    """
    missing = [key for key in needed if key not in data]
    unknown = next((key for key in data if key not in keys), None)
    if unknown is not None:
        hint = suggestion(str(unknown), keys, {word: ours for word, ours in OTHER_WORDS.items() if ours in keys})
        lacks = f" {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing." if missing else ""
        for key in lists:
            if isinstance(data.get(key), str | int | float):
                lacks += f" Nor can {key}: {data[key]!r} be used: a list is needed."
        remedy = f"There is no such key. {hint or 'Known: ' + ', '.join(sorted(keys)) + '.'}{lacks}"
        if isinstance(data[unknown], list | Mapping):  # no value to show
            raise InputError(field.rstrip("., ") or "key", str(unknown), remedy)
        raise InputError(f"{field}{unknown}", data[unknown], remedy)
    if missing:
        raise InputError(f"{field}{missing[0]}", None, f"Needed are {', '.join(needed)}.")


def spelled_out(data: Data, field: str) -> dict[str, Any]:
    """The plain data of a whole plan, its strategies spelled out where they are written in short form.

    Raises:
        FileFormatError: a key or a word of a strategy that does not exist.
    """
    try:
        _check_keys(data, _KEYS[Plan], f"{field}, ", lists=_PARTS)
        return dict(data) | {
            name: [_part(one, kind, f"{field}, {name}.{number}") for number, one in enumerate(data[name])]
            for name, kind in _PARTS.items()
            if isinstance(data.get(name), list)
        }
    except InputError as error:
        raise FileFormatError(error.field, error.value, error.remedy) from error


def _part(data: Any, kind: type, field: str) -> Any:
    """A stage or a branch; what is no mapping is left for the schema to refuse."""
    if not isinstance(data, Mapping):
        return data
    _check_keys(data, _KEYS[kind], f"{field}.")
    if not isinstance(data.get("runs"), list):
        return data
    runs = []
    for number, run in enumerate(data["runs"]):
        if isinstance(run, Mapping):
            _check_keys(run, _KEYS[LayerRun], f"{field}.runs.{number}.")
            run = _with_strategy(run, f"{field}.runs.{number}")
        runs.append(run)
    return {**data, "runs": runs}


def _with_strategy(run: Data, field: str) -> Data:
    strategy = run.get("strategy")
    if isinstance(strategy, Mapping):
        _check_keys(strategy, _KEYS[Strategy], f"{field}.strategy.")
    if isinstance(strategy, str):
        return {**run, "strategy": to_data(parse_strategy(strategy, f"{field}.strategy"))}
    return run


def plan_from(data: object, graph: ModelGraph, field: str) -> Plan:
    """A plan from what a file holds."""
    if not isinstance(data, Mapping):
        raise InputError(field, kind_of(data), "A plan is a mapping: devices, global_batch, microbatches, runs.")
    _check_keys(data, _KEYS[Plan] | {"runs"}, f"{field}, ", ("devices", "global_batch", "microbatches"))
    schedule = str(DELAYED_SCHEDULE if data.get("cyclic") else DEFAULT_SCHEDULE)
    plan: dict[str, Any] = {"version": PLAN_VERSION, "model": graph.name, "schedule": schedule}
    plan |= {"precision": graph.precision} | {
        key: value for key, value in data.items() if key not in ("runs", "stages")
    }
    names = [layer.name for layer in graph.layers]
    if data.get("branches"):
        plan["branches"], names = _branches(data["branches"], graph, field)
    plan["stages"], place = [], 0
    for number, stage in enumerate(_stages(data, field)):
        _check_keys(stage, _KEYS[Stage], f"{field}, stages.{number}.")
        runs = _resolved(stage, names[place:], f"{field}, stages.{number}") if names else []
        place += sum(run["count"] for run in runs)
        plan["stages"].append({**stage, "runs": runs})
    if place < len(names):
        remedy = f"The stages end before it: they have {place} of the {len(names)} layers of {graph.name}."
        raise InputError(f"{field}, strategy of {names[place]}", None, remedy)
    return check_plan(from_data(Plan, plan, field), field)


def _branches(branches: Any, graph: ModelGraph, field: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Branches by name, each with its devices and runs; and the names of the layers outside them."""
    known = {branch.name: branch for region in find_regions(graph) for branch in region.branches}
    placed, taken = list[dict[str, Any]](), set[str]()
    if not isinstance(branches, list) or not all(isinstance(branch, Mapping) for branch in branches):
        remedy = "Give a list of branches: name, first, devices, runs."
        raise InputError(f"{field}, branches", kind_of(branches), remedy)
    for number, one in enumerate(branches):
        place = f"{field}, branches.{number}"
        _check_keys(one, _KEYS[BranchPlacement], f"{place}.", ("name", "first", "devices"))
        if one["name"] not in known:
            has = f"It has {', '.join(known)}." if known else "It has no independent branches."
            raise InputError(f"{place}.name", one["name"], f"{graph.name} has no such branch. {has}")
        branch = known[one["name"]]
        placed.append({**one, "roots": list(branch.roots), "runs": _resolved(one, branch.layers, place)})
        taken.update(branch.layers)
    return placed, [layer.name for layer in graph.layers if layer.name not in taken]


def _stages(data: Data, field: str) -> Sequence[Data]:
    if "stages" in data and "runs" in data:
        raise InputError(f"{field}, runs", "beside stages", "Give runs (one stage) or stages, not both.")
    without: list[dict[str, Any]] | None = [{"runs": []}] if data.get("branches") else None
    stages = data.get("stages", [{"runs": data["runs"]}] if "runs" in data else without)
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, Mapping) for stage in stages):
        raise InputError(f"{field}, stages", stages, "Give a list of stages, each with its runs; or runs alone.")
    return stages


def _resolved(part: Data, names: Sequence[str], field: str) -> list[dict[str, Any]]:
    """The runs of a stage or a branch, by the layers that are not planned before it."""
    runs = part.get("runs")
    if not isinstance(runs, list) or not runs or not all(isinstance(run, Mapping) for run in runs):
        raise InputError(f"{field}, runs", runs, "Give a list of runs, each with layers and strategy.")
    place, resolved = 0, list[dict[str, Any]]()
    for index, run in enumerate(runs):
        resolved.append(_run(run, names[place:], f"{field}.runs.{index}"))
        place += resolved[-1]["count"]
    return resolved


def _run(run: Data, names: Sequence[str], field: str) -> dict[str, Any]:
    _check_keys(run, {"layers", *_KEYS[LayerRun]}, f"{field}.")
    if "strategy" not in run:
        raise InputError(f"{field}.strategy", None, "Say what the layers do: zero3x8, tensor4+sp recompute.")
    run = _with_strategy(run, field)
    if "layers" in run:
        count = _covered(str(run["layers"]), names, f"{field}.layers")
        return {"first": names[0], "last": names[count - 1], "count": count, "strategy": run["strategy"]}
    if "first" not in run:
        remedy = "Say which layers: a name, a range, a glob (* for all that are left)."
        raise InputError(f"{field}.layers", None, remedy)
    first, last = str(run["first"]), str(run.get("last", run["first"]))
    count = _covered(f"{first}..{last}", names, f"{field}.first")
    if run.get("count", count) != count or type(run.get("count", count)) is not int:
        raise InputError(f"{field}.count", run["count"], f"From {first} to {last} there are {count}.")
    return {**run, "count": count}


def _covered(wanted: str, names: Sequence[str], field: str) -> int:
    """How many of the next layers a name, range or glob takes."""
    goes_on = f"The model goes on with {names[0]}." if names else "All layers of the model are planned already."
    first, dots, last = wanted.partition("..")
    if not names or (dots and first != names[0]):
        raise InputError(field, wanted, goes_on)
    if dots and last not in names:
        alike = [name for name in names if name.rstrip("0123456789") == last.rstrip("0123456789")]
        end = f"the last{' of that name' if alike else ''} is {(alike or names)[-1]}"
        raise InputError(field, wanted, f"No layer {last} follows {names[0]}; {end}.")
    if dots:
        return list(names).index(last) + 1
    count = next((place for place, name in enumerate(names) if not fnmatchcase(name, wanted)), len(names))
    if count == 0:
        raise InputError(field, wanted, goes_on)
    return count
