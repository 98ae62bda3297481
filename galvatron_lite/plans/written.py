"""Plans as people write them: runs of layers by range or glob, strategies in short form.

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

from collections.abc import Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

from galvatron_lite.errors import InputError
from galvatron_lite.files import from_data, kind_of, to_data
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.pipeline.schedule import DELAYED_SCHEDULE
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import check_plan
from galvatron_lite.plans.schema import DEFAULT_SCHEDULE, PLAN_VERSION, BranchPlacement, Plan, Stage
from galvatron_lite.plans.spelled import check_keys, parse_strategy


def plan_from(data: object, graph: ModelGraph, field: str) -> Plan:
    """A plan from what a file holds."""
    if not isinstance(data, Mapping):
        raise InputError(field, kind_of(data), "A plan is a mapping: devices, global_batch, microbatches, runs.")
    _check_top(data, field)
    schedule = str(DELAYED_SCHEDULE if data.get("cyclic") else DEFAULT_SCHEDULE)
    whole: dict[str, Any] = {"version": PLAN_VERSION, "model": graph.name, "schedule": schedule}
    whole |= {"precision": graph.precision} | {
        key: value for key, value in data.items() if key not in ("runs", "stages")
    }
    names = [layer.name for layer in graph.layers]
    if data.get("branches"):
        whole["branches"], names = _branches(data, graph, field)
    stages, place = _stages(data, field), 0
    whole["stages"] = []
    for number, stage in enumerate(stages):
        check_keys(stage, [one.name for one in fields(Stage)], (), f"{field}, stages.{number}.")
        runs = _run_through(stage, names[place:], f"{field}, stages.{number}", bool(names))
        place += sum(run["count"] for run in runs)
        whole["stages"].append({**stage, "runs": runs})
    if place < len(names):
        said = f"The stages end before it: they have {place} of the {len(names)} layers of {graph.name}."
        raise InputError(f"{field}, strategy of {names[place]}", None, said)
    return check_plan(from_data(Plan, whole, field), field)


def _run_through(part: Mapping[str, Any], names: Sequence[str], field: str, some: bool = True) -> list[dict[str, Any]]:
    """The runs of a stage or a branch, from the layers that are not yet planned; ``some``: whether there are any."""
    place, runs = 0, list[dict[str, Any]]()
    for index, run in enumerate(_runs(part, field) if some else ()):
        made = _run(run, names[place:], f"{field}.runs.{index}")
        place += made["count"]
        runs.append(made)
    return runs


def _branches(data: Mapping[str, Any], graph: ModelGraph, field: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Branches by name, each with its devices and runs; and the names of the layers outside them."""
    from galvatron_lite.parallelism.branch.find import find_regions

    known = {branch.name: branch for region in find_regions(graph) for branch in region.branches}
    given, made, taken = data["branches"], list[dict[str, Any]](), set[str]()
    if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
        raise InputError(f"{field}, branches", kind_of(given), "Give a list of branches: name, first, devices, runs.")
    for number, one in enumerate(given):
        place = f"{field}, branches.{number}"
        check_keys(one, [own.name for own in fields(BranchPlacement)], ("name", "first", "devices"), f"{place}.")
        if one["name"] not in known:
            has = f"It has {', '.join(known)}." if known else "It has no independent branches."
            raise InputError(f"{place}.name", one["name"], f"{graph.name} has no such branch. {has}")
        branch = known[one["name"]]
        runs = _run_through(one, branch.layers, place)
        made.append({**one, "roots": list(branch.roots), "runs": runs})
        taken.update(branch.layers)
    return made, [layer.name for layer in graph.layers if layer.name not in taken]


def _check_top(data: Mapping[str, Any], field: str) -> None:
    """Whether the keys are a plan's; those that the model says may be left out."""
    known = {one.name for one in fields(Plan)} | {"runs"}
    check_keys(data, known, ("devices", "global_batch", "microbatches"), f"{field}, ")


def _stages(data: Mapping[str, Any], field: str) -> Sequence[Mapping[str, Any]]:
    if "stages" in data and "runs" in data:
        raise InputError(f"{field}, runs", "beside stages", "Give runs (one stage) or stages, not both.")
    without: list[dict[str, Any]] | None = [{"runs": []}] if data.get("branches") else None
    stages = data.get("stages", [{"runs": data["runs"]}] if "runs" in data else without)
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, Mapping) for stage in stages):
        raise InputError(f"{field}, stages", stages, "Give a list of stages, each with its runs; or runs alone.")
    return stages


def _runs(stage: Mapping[str, Any], field: str) -> Sequence[Mapping[str, Any]]:
    runs = stage.get("runs")
    if not isinstance(runs, list) or not runs or not all(isinstance(run, Mapping) for run in runs):
        raise InputError(f"{field}, runs", runs, "Give a list of runs, each with layers and strategy.")
    return runs


def _run(run: Mapping[str, Any], names: Sequence[str], field: str) -> dict[str, Any]:
    check_keys(run, ("layers", "first", "last", "count", "strategy"), (), f"{field}.")
    if "strategy" not in run:
        raise InputError(f"{field}.strategy", None, "Say what the layers do: zero3x8, tensor4+sp recompute.")
    strategy = run["strategy"]
    if isinstance(strategy, Mapping):
        check_keys(strategy, {one.name for one in fields(Strategy)}, (), f"{field}.strategy.")
    if isinstance(strategy, str):
        strategy = to_data(parse_strategy(strategy, f"{field}.strategy"))
    if "layers" not in run and "first" not in run:
        raise InputError(
            f"{field}.layers", None, "Say which layers: a name, a range, a glob (* for all that are left)."
        )
    if "layers" not in run:
        return {**run, "count": _count(run, names, field), "strategy": strategy}
    count = _covered(str(run["layers"]), names, f"{field}.layers")
    return {"first": names[0], "last": names[count - 1], "count": count, "strategy": strategy}


def _count(run: Mapping[str, Any], names: Sequence[str], field: str) -> int:
    ends = str(run.get("first")), str(run.get("last", run.get("first")))
    count = _covered("..".join(ends), names, f"{field}.first")
    if run.get("count", count) != count or type(run.get("count", count)) is not int:
        raise InputError(f"{field}.count", run["count"], f"From {ends[0]} to {ends[1]} there are {count}.")
    return count


def _covered(wanted: str, names: Sequence[str], field: str) -> int:
    """How many of the next layers a name, range or glob takes."""
    goes_on = f"The model goes on with {names[0]}." if names else "All layers of the model are planned already."
    first, dots, last = wanted.partition("..")
    if not names or (dots and first != names[0]):
        raise InputError(field, wanted, goes_on)
    if dots and last not in names:
        raise InputError(field, wanted, _no_end(last, names))
    if dots:
        return list(names).index(last) + 1
    count = next((place for place, name in enumerate(names) if not fnmatchcase(name, wanted)), len(names))
    if count == 0:
        raise InputError(field, wanted, goes_on)
    return count


def _no_end(last: str, names: Sequence[str]) -> str:
    """What to say where a range ends with a layer that is not to come; with the last one called like it."""
    alike = [name for name in names if name.rstrip("0123456789") == last.rstrip("0123456789")]
    return f"No layer {last} follows {names[0]}; the last{' of that name' if alike else ''} is {(alike or names)[-1]}."
