"""Cases by number: a command, or what reads a file, and the file, mutated."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from galvatron_lite import api
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.files import read_data, read_value, to_data
from galvatron_lite.folders import Content
from galvatron_lite.launch.jobs import MARK, NodeReport, read_reports
from galvatron_lite.model.shapes import load_model
from galvatron_lite.oracle.request import Network
from galvatron_lite.plans.io import read_plan
from galvatron_lite.plans.phases import PHASES_VERSION, read_phases, read_training_plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import read_profile
from galvatron_lite.runtime.checkpoint.manifest import (
    FORMAT,
    Manifest,
    Piece,
    TensorRecord,
    read_manifest,
    write_sealed,
)
from tests.fuzz.damage import VALUES, damaged, hostile, nonsense, scrambled
from tests.runs.lines import a_header, a_rank_header, text_of

ROOT = Path(__file__).parents[2]
_CLUSTERS, _MODELS = ROOT / "configs/clusters", ROOT / "configs/models"
_SMALL = {"layers": 2, "depths": [1, 1, 1, 1]}


@cache
def known_profile() -> Profile:
    """Of a model small enough that planning takes no time; kept in no folder of the project."""
    small = load_model("llama2-7b", overrides={"layers": 3}, sequence=128)
    with tempfile.TemporaryDirectory() as folder:
        return api.profile(small, estimate=True, cluster="b200", gpus=4, folder=folder)


@cache
def plans() -> tuple[Any, ...]:
    """Valid plans as data: mixed strategies, a pipeline, cyclic data parallelism, inference, one by hand."""
    asked: list[dict[str, Any]] = [
        {"mem": "60GB"}, {"fix": "pp=2"}, {"fix": ("rule=cdp-v1", "setting=data"), "allow_delay": True, "mem": "99%"},
        {"mode": "inference"},
    ]  # fmt: skip
    by_hand = {"devices": 4, "global_batch": 16, "microbatches": 2, "runs": [{"layers": "*", "strategy": "zero3x4"}]}
    return (*(to_data(api.plan(known_profile(), batch=16, runners_up=1, **one)) for one in asked), by_hand)


@cache
def _written(name: str) -> str:
    """Text of a valid file that commands read beside the mutated one."""
    data = to_data(known_profile()) if name == "profile.json" else plans()[0]
    return json.dumps(data)


def _phased() -> Any:
    phase = {"name": "one", "steps": 10, "first": 0, "sequence": 1024, "plan": plans()[0]}
    return {"version": PHASES_VERSION, "phases": [phase, {**phase, "first": 10}]}


def _model(draw: random.Random) -> Any:
    data = read_data(draw.choice(sorted(_MODELS.glob("*.yaml"))))
    short = {name: value for name, value in _SMALL.items() if name in data and len(data.get("widths", [0] * 4)) == 4}
    return data | short


_PRICED = "--profile profile.json"
KINDS: dict[str, tuple[Callable[[random.Random], Any], Sequence[str]]] = {
    "plan": (
        lambda draw: draw.choice(plans()),
        (f"evaluate FILE {_PRICED} --json", f"compare FILE plan.json {_PRICED}", "export FILE --to TOOL",
         f"explain FILE {_PRICED} --no-what-if", f"report FILE {_PRICED} --search 0 -o out.html",
         "plan export FILE --to hetu -o out.json", "plan import FILE --from hetu"),
    ),
    "phased": (lambda _: _phased(), (f"evaluate FILE {_PRICED}",)),
    "profile": (
        lambda _: to_data(known_profile()),
        ("plan --profile FILE --batch 8", "evaluate plan.json --profile FILE",
         "explain plan.json --profile FILE --no-what-if"),
    ),
    "cluster": (
        lambda draw: read_data(draw.choice(sorted(_CLUSTERS.glob("*.yaml")))),
        ("evaluate plan.json --model model.yaml --cluster FILE --gpus 4",
         "plan --model model.yaml --cluster FILE --gpus 4 --batch 8",
         "oracle resnet50 --cluster FILE --gpus 1..4"),
    ),
    "model": (
        _model,
        ("plan --model FILE --cluster a100-80gb --gpus 2 --batch 4",
         "oracle FILE --cluster abci --gpus 4"),
    ),
    "network": (
        lambda _: read_data(ROOT / "profiles/paradl/models/resnet50.yaml"),
        ("oracle FILE --cluster abci --gpus 1..8 --formulas paradl",),
    ),
    "phases": (
        lambda draw: read_data(draw.choice(sorted((ROOT / "configs/phases").glob("*.yaml")))),
        ("plan --phases FILE --model model.yaml --cluster b200 --gpus 2",),
    ),
    "config": (
        lambda _: {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 99},
        ("plan --model FILE --cluster a100-80gb --gpus 2",),
    ),
}  # fmt: skip
"""Kinds of files: a valid one, and commands that read it as FILE."""
_LINES = {"rows": "validate FILE", "run": "diagnose run", "decisions": "adapt replay FILE"}


def case(number: int, folder: Path) -> list[str]:
    """The words of a case's command; its files are written to a folder.

    ``read KIND FILE`` and ``refuse KIND FILE`` are no commands: they name one of ``READERS``. A file that is to be
    refused holds a value that its field never has.
    """
    draw = random.Random(number)
    for name in SLURM:
        os.environ.pop(name, None)
    for name in ("plan.json", "profile.json"):
        if not (folder / name).exists():
            (folder / name).write_text(_written(name))
            (folder / "train.py").touch()
            (folder / "model.yaml").write_text(yaml.safe_dump(read_data(_MODELS / "llama2-7b.yaml") | {"layers": 3}))
    way = draw.random()
    if way < 0.4:
        return _reading(draw, folder)
    if way < 0.5:
        file, command = _job(draw, folder)
    elif way < 0.55:
        file, command = _lines(draw, folder)
    else:
        kind = draw.choice([*KINDS, "plan", "plan", "profile", "cluster", "model"])
        valid, commands = KINDS[kind]
        file, command = _write(valid(draw), draw, folder), draw.choice(commands)
    words = {"FILE": str(file), "TOOL": draw.choice(["deepspeed", "megatron", "torchtitan", "accelerate", "nemo"])}
    beside = ("plan.json", "profile.json", "model.yaml", "out.html", "out.json", "run", "train.py")
    words |= {name: str(folder / name) for name in beside}
    return [words.get(word, word) for word in command.split()]


def _write(data: Any, draw: random.Random, folder: Path) -> Path:
    """Values swapped, bytes changed, or something hostile put in the place of a value."""
    path = folder / draw.choice(["file.yaml", "file.json"])
    way = draw.random()
    if way < 0.85:
        data = damaged(data, draw)
    text = json.dumps(data) if path.suffix == ".json" else yaml.dump(data, Dumper=yaml.CSafeDumper, sort_keys=False)
    if 0.85 <= way < 0.9:
        text = hostile(path.suffix, draw)
    raw = text.encode("utf-8", errors="surrogatepass")
    path.write_bytes(scrambled(raw, draw) if way >= 0.9 else raw)
    return path


def _lines(draw: random.Random, folder: Path) -> tuple[Path, str]:
    """A file of JSON lines: published runs, the log of a run, or of decisions."""
    kind = draw.choice(list(_LINES))
    if kind == "rows":
        with (ROOT / "profiles/published/runs.jsonl").open() as stream:
            records = [json.loads(line) for line, _ in zip(stream, range(5), strict=False)]
    else:
        text = text_of([a_header(), a_rank_header(0)] if kind == "run" else [a_header()])
        records = [json.loads(line) for line in text.splitlines()]
    raw = "".join(json.dumps(damaged(one, draw) if draw.random() < 0.7 else one) + "\n" for one in records).encode()
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    path = run / ("steps-00001.jsonl" if kind == "run" else "lines.jsonl")
    path.write_bytes(scrambled(raw, draw) if draw.random() < 0.3 else raw)
    return path, _LINES[kind]


SLURM = ("SLURM_JOB_ID", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")


def _job(draw: random.Random, folder: Path) -> tuple[Path, str]:
    """A job: the hosts of a file, or what Slurm says of nodes."""
    path, command = folder / "hosts", "launch --dry-run --gpus 8"
    if draw.random() < 0.3:
        for name in SLURM:
            os.environ[name] = draw.choice([*map(str, VALUES), "8", "a100:4", "a100:2,v100:2", "\u00b2"]).replace(
                "\0", ""
            )
        return path, f"{command} --through slurm train.py"
    raw = b"# ours\nworker-1 slots=4\nuser@10.0.0.2 slots = 4 max_slots=8\n"
    for _ in range(draw.randint(1, 2)):
        old, new = draw.choice([b"4", b"worker-1", b"slots", b" ", b"\n", b"="]), str(draw.choice(VALUES))
        raw = raw.replace(old, new.encode("utf-8", "replace"), 1)
    path.write_bytes(scrambled(raw, draw) if draw.random() < 0.5 else raw)
    return path, f"{command} --hostfile FILE train.py"


def _manifest(_: random.Random) -> Any:
    files = {name: Content(8, "0" * 64) for name in ("training.pt", "rank-0.pt", "rank-0.safetensors")}
    whole = TensorRecord("float32", (4, 2), (Piece((0, 0), (4, 2), "rank-0.safetensors"),))
    manifest = Manifest(
        FORMAT, 7, "0" * 64, 1, {"weight": "weight"}, {"weight": whole}, files, "AdamW", None, "a", 3, {"b": 2}
    )
    return to_data(manifest)


def _read_manifest(path: Path) -> object:
    """As whoever forges a checkpoint would write it: with a sound checksum."""
    folder = path.parent / "checkpoint"
    folder.mkdir(exist_ok=True)
    write_sealed(folder, replace(read_value(Manifest, path), digest=""))
    return read_manifest(folder)


def _read_cluster(path: Path) -> object:
    """All of it; of what has any size, so many devices."""
    text = path.read_text(errors="replace")
    return load_cluster(path, 8 if "any" in text or "up to" in text else None)


READERS: dict[str, tuple[Callable[[random.Random], Any], Callable[[Path], object]]] = {
    "plan": (lambda draw: draw.choice(plans()[:-1]), read_plan),
    "phased": (lambda _: _phased(), read_training_plan),
    "profile": (KINDS["profile"][0], read_profile),
    "cluster": (KINDS["cluster"][0], _read_cluster),
    "model": (_model, lambda path: load_model(str(path))),
    "network": (KINDS["network"][0], lambda path: read_value(Network, path)),
    "phases": (KINDS["phases"][0], read_phases),
    "manifest": (_manifest, _read_manifest),
    "report": (
        lambda _: to_data(NodeReport("a", "0" * 64, {"torch": "2"}, 8, 2**36, 2**38)),
        lambda path: read_reports(f"Welcome!\n{MARK}{path.read_text(errors='replace')}"),
    ),
}
"""Kinds of files: valid data, and what reads them, without what commands do with them."""


def _tensors(path: Path) -> None:
    from galvatron_lite.runtime.checkpoint.shards import TensorFile

    file = TensorFile(path)
    for name in file.places:
        file.tensor(name)


def _index(path: Path) -> None:
    from torch import nn

    from galvatron_lite.runtime.checkpoint.huggingface import INDEX, load_safetensors

    path.replace(path.with_name(INDEX))
    load_safetensors(nn.Linear(2, 4), path.parent)


def _plain(path: Path) -> None:
    from galvatron_lite.runtime.checkpoint.plain import read_plain

    read_plain(path)


BINARY = {"tensors": _tensors, "index": _index, "plain": _plain}
"""Files of checkpoints that hold tensors, and what reads them."""


@cache
def _valid(kind: str) -> bytes:
    import torch

    from galvatron_lite.runtime.checkpoint.plain import write_plain
    from galvatron_lite.runtime.checkpoint.shards import write_tensors

    tensors = {"weight": torch.ones(4, 2), "bias": torch.ones(4)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        write_tensors(path, tensors) if kind == "tensors" else write_plain(
            path, {"state": tensors, "at": [1, 2.5, "x"]}
        )
        return path.read_bytes()


def _reading(draw: random.Random, folder: Path) -> list[str]:
    """A file and what reads it."""
    kind = draw.choice([*READERS, *BINARY, "plan", "manifest"])
    path = folder / f"{kind}.json"
    if kind in BINARY:
        text = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(("weight", "bias"), "tensors")}).encode()
        if kind == "index":
            (folder / "tensors").write_bytes(_valid("tensors"))
        path.write_bytes(scrambled(text if kind == "index" else _valid(kind), draw))
        return ["read", kind, str(path)]
    data = READERS[kind][0](draw)
    if draw.random() < 0.3:
        path = _write(data, draw, folder)
        return ["read", kind, str(path)]
    path.write_text(nonsense(data, draw))
    return ["refuse", kind, str(path)]
