"""Which ways to split which models train like one process; run by ``scripts/support_matrix``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from support_matrix_families import NAMED, Family, build, known_families
from support_matrix_page import DATA, SAMPLES, WAYS, Way, write_page
from support_matrix_ranks import Failure, fork, gather
from support_matrix_trial import SECONDS, State, train_alone, try_way

from galvatron_lite.capture.named import load_factory
from galvatron_lite.capture.trace import trace
from galvatron_lite.cli.terminal import progress_bar
from galvatron_lite.errors import InputError
from galvatron_lite.files import read_data, write_data
from galvatron_lite.model.batch import resize_batch
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.profiler.timing import Journal

PREPARING = 240.0  # seconds that a family has to be built, captured and trained by one process
HERE = re.compile(r"/\S*?/site-packages/")
"""Where packages lie on this machine: a file of the table names them from there."""
Row = dict[str, Any]


def own_family(target: str) -> Family:
    """A user's model, from ``FILE.py:FACTORY``."""
    import torch

    model, batch, loss_fn = load_factory(target)
    batch = model.example_batch() if batch is None and hasattr(model, "example_batch") else batch
    if batch is None:
        raise InputError("--model", target, "Return the model and an example batch (and loss_fn(output, batch)).")
    torch.manual_seed(0)
    return Family(target, model.train(), lambda samples: resized(batch, samples), loss_fn)


def resized(batch: Any, samples: int) -> Any:
    """A batch of so many samples with values of the example's, in another order each time."""
    import torch

    from galvatron_lite.model.batch import batch_size, map_tensors

    own = batch_size(batch)
    rows = torch.randint(0, own, (samples,))
    return map_tensors(batch, lambda tensor: tensor[rows] if tensor.dim() and tensor.shape[0] == own else tensor)


def capture(family: Family) -> ModelGraph:
    """The model as the planner sees it."""
    return trace(family.model, resize_batch(family.batches(SAMPLES), SAMPLES), loss_fn=family.loss_fn, name=family.name)


def judge(make: Callable[[], Family], ways: Sequence[Way]) -> Row:
    """The row of a family: what it is, and what came of every way; why there is nothing where it cannot be captured."""
    warnings.simplefilter("ignore")
    family = make()
    graph = capture(family)
    reference = train_alone(family)
    blocks = sum(layer.role is Role.BLOCK for layer in graph.layers)
    row: Row = {"model": type(family.model).__name__, "layers": len(graph.layers), "blocks": blocks, "ways": {}}
    for way in ways:
        outcome = try_way(family, graph, way, reference)
        if outcome.state is not State.NOTHING:
            row["ways"][way.name] = {"state": outcome.state.value, "why": HERE.sub("", outcome.why)}
            row["ways"][way.name] |= {} if outcome.error is None else {"error": outcome.error}
    return row


def in_a_process(make: Callable[[], Family], ways: Sequence[Way]) -> Row:
    """``judge`` in a process of its own, which may die."""
    seconds = PREPARING + 2 * SECONDS * len(ways)
    found = gather([fork(lambda: judge(make, ways), leads=True)], seconds)
    if isinstance(found, Failure):
        return {"refused" if found.ours else "failed": found.text}
    row: Row = found[0]
    return row


def warm_up(ways: Sequence[Way]) -> None:
    """Have the compiler imported before processes are forked that use it."""
    import torch

    for backend in {way.options["compile"] for way in ways if "compile" in way.options}:
        torch.compile(torch.nn.Linear(1, 1), backend=backend)(torch.ones(1, 1)).sum().backward()


def versions() -> dict[str, str]:
    """What the rows are of."""
    import torch
    import transformers

    import galvatron_lite

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "galvatron_lite": galvatron_lite.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def run(names: Sequence[str], ways: Sequence[Way], journal: Journal, quiet: bool) -> dict[str, Row]:
    """Rows of families that have none yet, or could not be tried; Ctrl-C keeps those that are finished."""
    waiting = [name for name in names if "ways" not in journal.finished.get(name, {})]
    try:
        with progress_bar("Families", quiet) as move:
            for number, name in enumerate(waiting):
                move(number, len(waiting), name)
                journal.add(name, in_a_process(partial(build, name), ways))
                print(f"{name}: {summary(journal.finished[name])}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("Interrupted: run again to go on with the families that are missing.", file=sys.stderr)
    return {name: journal.finished[name] for name in names if name in journal.finished}


def summary(row: Mapping[str, Any]) -> str:
    """A row in a line."""
    if "ways" not in row:
        return next(f"{key}: {value}" for key, value in row.items())
    states = [one["state"] for one in row["ways"].values()]
    bad = [
        f"{way} {one['state']}: {one['why']}"
        for way, one in row["ways"].items()
        if one["state"] in ("wrong", "crashes", "not known")
    ]
    return ", ".join([f"{states.count(state)} {state}" for state in dict.fromkeys(states)]) + "".join(
        f"\n    {one}" for one in bad
    )


def show(row: Mapping[str, Any], name: str) -> None:
    """A row as a table in the terminal."""
    if "ways" not in row:
        print(f"{name} cannot be tried: {summary(row)}")
        return
    table = Table("way", "state", "why", title=f"{name}: {row['model']}, {row['layers']} layers")
    for way, one in row["ways"].items():
        table.add_row(way, one["state"], one["why"])
    Console().print(table)


def kept(data: Mapping[str, Any], rows: Mapping[str, Row], ways: Sequence[Way]) -> dict[str, Any]:
    """The data file with new rows; of ways that were not tried again what there was."""
    before = dict(data.get("families", {}))
    for name, row in rows.items():
        old = before.get(name, {}).get("ways", {}) if len(ways) < len(WAYS) else {}
        fresh = dict(row) if "ways" not in row else {**row, "ways": {**old, **row["ways"]}}
        before[name] = {**fresh, "date": versions()["date"]}
    before = {**{name: {} for name in NAMED}, **before}  # those that were not run are told, too
    known = {name: number for number, name in enumerate(known_families())}
    ordered = sorted(before, key=lambda name: known.get(name, len(known)))
    return {"measured": versions(), "families": {name: before[name] for name in ordered}}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=(), metavar="FAMILY", help="types of transformers' models")
    parser.add_argument("--ways", nargs="+", choices=[way.name for way in WAYS], help="all of them if not given")
    parser.add_argument("--all", action="store_true", help=f"every type that builds, not the {len(NAMED)} named ones")
    parser.add_argument("--model", metavar="FILE.py:FACTORY", help="a model of your own, beside no other")
    parser.add_argument("--output", type=Path, default=DATA, help="the data file that rows are added to")
    parser.add_argument("--anew", action="store_true", help="try what a run before has finished, too")
    parser.add_argument("--json", action="store_true", help="print the rows")
    parser.add_argument("--page", action="store_true", help="only write docs/support.md from the data")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    if chosen.page:
        write_page()
        return
    ways = [way for way in WAYS if chosen.ways is None or way.name in chosen.ways]
    warm_up(ways)
    if chosen.model:
        row = in_a_process(lambda: own_family(chosen.model), ways)
        print(json.dumps(row, indent=1)) if chosen.json else show(row, chosen.model)
        return
    names = list(chosen.only or (known_families() if chosen.all else NAMED))
    identity = json.dumps([{**versions(), "date": ""}, [way.name for way in ways]])
    path = chosen.output.with_suffix(".journal")
    journal = Journal(path, identity, resume=not chosen.anew)
    rows = run(names, ways, journal, chosen.json)
    data = read_data(chosen.output) if chosen.output.exists() else {}
    write_data(chosen.output, kept(data, rows, ways))
    if len(rows) == len(names):
        journal.remove()
    if chosen.output == DATA:
        write_page()
    if chosen.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
