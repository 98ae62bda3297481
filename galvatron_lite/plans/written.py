"""Plan files as people write and edit them.

    devices: 8
    global_batch: 64
    microbatches: 4
    runs:
    - {layers: embed, strategy: zero3x8}
    - {layers: layers.0..layers.31, strategy: zero3x8 recompute}
    - {layers: head, strategy: zero3x8}

A pipeline has ``stages: [{runs: [...]}, ...]`` instead of ``runs``. Independent branches on devices of their own are
``branches: [{name: left, first: 0, devices: 4, runs: [...]}, ...]``; ``runs`` then has the other layers, if any.
``layers`` is a name, a range or a glob (``layers.*``). A glob takes all layers that match, one after the other, from
where the run before it ended. A file that ``galvatron plan`` wrote can be read so, too.
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

KEY_ALIASES = {
    "batch": "global_batch", "batch_size": "global_batch", "global_batch_size": "global_batch", "gpus": "devices",
    "world_size": "devices", "chunks": "microbatches", "gradient_accumulation": "microbatches",
    "tp": "tensor", "sp": "sequence_parallel", "cp": "context", "dp": "data", "ep": "expert",
}  # fmt: skip
"""Our keys by the names that other software has for them, for suggestions."""
_KEYS: dict[type, set[str]] = {
    schema: {field.name for field in fields(schema)} for schema in (Plan, Stage, BranchPlacement, LayerRun, Strategy)
}
_LISTS = {"stages": Stage, "branches": BranchPlacement}
Data = Mapping[str, Any]


def parse_strategy(text: str, field: str = "strategy") -> Strategy:
    """Parse a strategy in short form (``zero3x8 tensor2+sp recompute``).

    Raises:
        InputError: a word that is unknown, or that sets again what another word sets.
    """
    examples = ", ".join(dimension.examples or f"{dimension.degree}2" for dimension in pinned())
    remedy = f"Write parts such as {examples}; or {UNSPLIT}."
    settings: dict[str, object] = {}
    for word in text.split():
        word_settings = fields_in(word)
        if word_settings is None or word_settings.keys() & settings.keys():
            raise InputError(field, word if word_settings is None else text, remedy)
        settings |= word_settings
    if not text.split():
        raise InputError(field, text, remedy)
    return strategy_of(settings)


def spelled_out(data: Data, field: str) -> dict[str, Any]:
    """The plain data of a plan, with every strategy in short form replaced by its fields.

    Raises:
        FileFormatError: an unknown key, or a strategy that cannot be parsed.
    """
    try:
        _check_keys(data, _KEYS[Plan], f"{field}, ", lists=_LISTS)
        return dict(data) | {
            name: [_spelled_out(item, schema, f"{field}, {name}.{number}") for number, item in enumerate(data[name])]
            for name, schema in _LISTS.items()
            if isinstance(data.get(name), list)
        }
    except InputError as error:
        raise FileFormatError(error.field, error.value, error.remedy) from error


def _spelled_out(data: Any, schema: type, field: str) -> Any:
    """A stage or a branch with its strategies spelled out; what is not a mapping is left for the schema to refuse."""
    if not isinstance(data, Mapping):
        return data
    _check_keys(data, _KEYS[schema], f"{field}.")
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


def _check_keys(
    data: Data, keys: Collection[str], field: str, needed: Sequence[str] = (), lists: Collection[str] = ()
) -> None:
    """Check that a mapping has all needed keys and no unknown ones.

    Args:
        data: the mapping.
        keys: known keys.
        field: of the mapping in errors, with the separator before a key.
        needed: keys that must be there.
        lists: keys that need a list; the error for an unknown key also names those with a plain value, as the list may
            be under the unknown key.
    """
    missing = [key for key in needed if key not in data]
    unknown = next((key for key in data if key not in keys), None)
    if unknown is not None:
        hint = suggestion(str(unknown), keys, {word: key for word, key in KEY_ALIASES.items() if key in keys})
        more = f" {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing." if missing else ""
        for key in lists:
            if isinstance(data.get(key), str | int | float):
                more += f" Nor can {key}: {data[key]!r} be used: a list is needed."
        remedy = f"There is no such key. {hint or 'Known: ' + ', '.join(sorted(keys)) + '.'}{more}"
        if isinstance(data[unknown], list | Mapping):  # too long to show
            raise InputError(field.rstrip("., ") or "key", str(unknown), remedy)
        raise InputError(f"{field}{unknown}", data[unknown], remedy)
    if missing:
        raise InputError(f"{field}{missing[0]}", None, f"Needed are {', '.join(needed)}.")


def plan_from(data: object, graph: ModelGraph, field: str) -> Plan:
    """Parse and check the content of a file as a plan for a model.

    Args:
        data: the content.
        graph: the model, for the names of its layers.
        field: of the file in errors.

    Raises:
        InputError: an unknown key, layer or strategy, or numbers that contradict one another.
    """
    if not isinstance(data, Mapping):
        raise InputError(field, kind_of(data), "A plan is a mapping: devices, global_batch, microbatches, runs.")
    _check_keys(data, _KEYS[Plan] | {"runs"}, f"{field}, ", ("devices", "global_batch", "microbatches"))
    schedule = str(DELAYED_SCHEDULE if data.get("cyclic") else DEFAULT_SCHEDULE)
    plan: dict[str, Any] = {"version": PLAN_VERSION, "model": graph.name, "schedule": schedule}
    plan |= {"precision": graph.precision}
    plan |= {key: value for key, value in data.items() if key not in ("runs", "stages")}
    names = [layer.name for layer in graph.layers]
    if data.get("branches"):
        plan["branches"], names = _branches(data["branches"], graph, field)
    plan["stages"], planned = [], 0
    for number, stage in enumerate(_stages(data, field)):
        _check_keys(stage, _KEYS[Stage], f"{field}, stages.{number}.")
        runs = _runs(stage, names[planned:], f"{field}, stages.{number}") if names else []
        planned += sum(run["count"] for run in runs)
        plan["stages"].append({**stage, "runs": runs})
    if planned < len(names):
        remedy = f"The stages end before it: they have {planned} of the {len(names)} layers of {graph.name}."
        raise InputError(f"{field}, strategy of {names[planned]}", None, remedy)
    return check_plan(from_data(Plan, plan, field), field)


def _branches(data: Any, graph: ModelGraph, field: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The branches with their runs spelled out, and the names of the layers outside them."""
    model_branches = {branch.name: branch for region in find_regions(graph) for branch in region.branches}
    placed, taken = list[dict[str, Any]](), set[str]()
    if not isinstance(data, list) or not all(isinstance(branch, Mapping) for branch in data):
        remedy = "Give a list of branches: name, first, devices, runs."
        raise InputError(f"{field}, branches", kind_of(data), remedy)
    for number, placement in enumerate(data):
        name = f"{field}, branches.{number}"
        _check_keys(placement, _KEYS[BranchPlacement], f"{name}.", ("name", "first", "devices"))
        branch = model_branches.get(placement["name"])
        if branch is None:
            has = f"It has {', '.join(model_branches)}." if model_branches else "It has no independent branches."
            raise InputError(f"{name}.name", placement["name"], f"{graph.name} has no such branch. {has}")
        placed.append({**placement, "roots": list(branch.roots), "runs": _runs(placement, branch.layers, name)})
        taken.update(branch.layers)
    return placed, [layer.name for layer in graph.layers if layer.name not in taken]


def _stages(data: Data, field: str) -> Sequence[Data]:
    if "stages" in data and "runs" in data:
        raise InputError(f"{field}, runs", "beside stages", "Give runs (one stage) or stages, not both.")
    if "runs" in data:
        return [{"runs": data["runs"]}]
    stages = data.get("stages", [{"runs": []}] if data.get("branches") else None)
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, Mapping) for stage in stages):
        raise InputError(f"{field}, stages", stages, "Give a list of stages, each with its runs; or runs alone.")
    return stages


def _runs(part: Data, names: Sequence[str], field: str) -> list[dict[str, Any]]:
    """The runs of a stage or a branch, spelled out; ``names``: of the layers that are left for it."""
    data = part.get("runs")
    if not isinstance(data, list) or not data or not all(isinstance(run, Mapping) for run in data):
        raise InputError(f"{field}, runs", data, "Give a list of runs, each with layers and strategy.")
    planned, runs = 0, list[dict[str, Any]]()
    for number, run in enumerate(data):
        runs.append(_run(run, names[planned:], f"{field}.runs.{number}"))
        planned += runs[-1]["count"]
    return runs


def _run(run: Data, names: Sequence[str], field: str) -> dict[str, Any]:
    _check_keys(run, {"layers", *_KEYS[LayerRun]}, f"{field}.")
    if "strategy" not in run:
        raise InputError(f"{field}.strategy", None, "Say what the layers do: zero3x8, tensor4+sp recompute.")
    run = _with_strategy(run, field)
    if "layers" in run:
        count = _count_layers(str(run["layers"]), names, f"{field}.layers")
        return {"first": names[0], "last": names[count - 1], "count": count, "strategy": run["strategy"]}
    if "first" not in run:
        remedy = "Say which layers: a name, a range, a glob (* for all that are left)."
        raise InputError(f"{field}.layers", None, remedy)
    first, last = str(run["first"]), str(run.get("last", run["first"]))
    count = _count_layers(f"{first}..{last}", names, f"{field}.first")
    if run.get("count", count) != count or type(run.get("count", count)) is not int:
        raise InputError(f"{field}.count", run["count"], f"From {first} to {last} there are {count}.")
    return {**run, "count": count}


def _count_layers(pattern: str, names: Sequence[str], field: str) -> int:
    """The number of the next layers that a name, range or glob takes."""
    goes_on = f"The model goes on with {names[0]}." if names else "All layers of the model are planned already."
    first, dots, last = pattern.partition("..")
    if not names or (dots and first != names[0]):
        raise InputError(field, pattern, goes_on)
    if dots and last not in names:
        alike = [name for name in names if name.rstrip("0123456789") == last.rstrip("0123456789")]
        end = f"the last{' of that name' if alike else ''} is {(alike or names)[-1]}"
        raise InputError(field, pattern, f"No layer {last} follows {names[0]}; {end}.")
    if dots:
        return list(names).index(last) + 1
    count = next((index for index, name in enumerate(names) if not fnmatchcase(name, pattern)), len(names))
    if count == 0:
        raise InputError(field, pattern, goes_on)
    return count
