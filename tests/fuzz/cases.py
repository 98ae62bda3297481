"""Cases by number: a command, and the file that it reads, mutated."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from galvatron_lite import api
from galvatron_lite.files import read_data, to_data
from galvatron_lite.model.shapes import load_model
from galvatron_lite.plans.phases import PHASES_VERSION
from galvatron_lite.profiler.schema import Profile
from tests.fuzz.damage import damaged, hostile, scrambled
from tests.runs.lines import a_header, a_rank_header, text_of

ROOT = Path(__file__).parents[2]
_CLUSTERS, _MODELS = ROOT / "configs/clusters", ROOT / "configs/models"
_SMALL = {"layers": 2, "depths": [1, 1, 1, 1]}


@cache
def known_profile() -> Profile:
    """Of a model small enough that planning takes no time."""
    return api.profile(
        load_model("llama2-7b", overrides={"layers": 3}, sequence=128), estimate=True, cluster="b200", gpus=4
    )


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
    """The words of a case's command; its files are written to a folder."""
    draw = random.Random(number)
    for name in ("plan.json", "profile.json"):
        if not (folder / name).exists():
            (folder / name).write_text(_written(name))
            (folder / "model.yaml").write_text(yaml.safe_dump(read_data(_MODELS / "llama2-7b.yaml") | {"layers": 3}))
    if draw.random() < 0.05:
        file, command = _lines(draw, folder)
    else:
        kind = draw.choice([*KINDS, "plan", "plan", "profile", "cluster", "model"])
        valid, commands = KINDS[kind]
        file, command = _write(valid(draw), draw, folder), draw.choice(commands)
    known = {"FILE": str(file), "TOOL": draw.choice(["deepspeed", "megatron", "torchtitan", "accelerate", "nemo"])}
    known |= {
        name: str(folder / name) for name in ("plan.json", "profile.json", "model.yaml", "out.html", "out.json", "run")
    }
    return [known.get(word, word) for word in command.split()]


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
