"""A folder as a reader of the pages has it: a training script, its measured profile, a plan, a run, its checkpoints."""

from __future__ import annotations

import json
import shlex
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from galvatron_lite import Adapt, auto_parallelize
from galvatron_lite.cli import app
from tests.auto_jobs import measuring_briefly
from tests.docs.branch_page import run_page
from tests.docs.pages import ROOT, blocks, text_of
from tests.studies.hetu.cases import found

RUNS, SUBMISSIONS = "profiles/published/runs.jsonl", "profiles/published/mlperf.jsonl"
STEPS = 4
PLANS = {
    "docs/evaluate.md": "",  # the one written by hand that the page shows
    "docs/export.md": "plan --model gpt2 --cluster a100-40gb --gpus 8 --batch 64 --fix zero=3 -o plan.yaml",
    "docs/launch.md": "plan --model gpt2 --cluster a100-40gb --gpus 16 --batch 64 -o plan.yaml",
    "docs/troubleshooting.md": "plan --profile profiles/t4/Model.yaml --batch 16 -o plan.yaml",
}
"""How the ``plan.yaml`` of a page is made, where it is not that of the training script on this process alone."""

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
}
"""A configuration as the hub has it."""


def galvatron(words: str) -> str:
    """What a command prints, run in this process and in its current folder; with ``galvatron`` or without.

    Where it measures, each figure takes few repetitions: no page shows what was measured here.

    Raises:
        AssertionError: it failed; with what it printed.
    """
    with measuring_briefly():
        done = CliRunner().invoke(app, shlex.split(words.removeprefix("galvatron ")))
    assert done.exit_code == 0, f"{words}\n{done.output}\n{done.exception!r}"
    return done.output


def make_place(place: Path) -> None:
    """The folder, but for what a page has of its own; trains a few steps of the first page's script."""
    (place / "train.py").write_text(blocks(text_of("docs/first-plan.md"), "python")[0])
    with chdir(place):
        galvatron("profile train.py:make_model --estimate --cluster t4 --gpus 2")
        galvatron("profile train.py:make_model --max-samples 4")
        galvatron("plan --batch 16 -o plan.yaml")
        _train(place)
    lines = text_of(RUNS).splitlines()
    few = [line for number, line in enumerate(lines) if number % 90 == 0 or '"nanotron-' in line]
    (place / RUNS).parent.mkdir(parents=True)
    (place / RUNS).write_text("\n".join(few) + "\n")
    (place / SUBMISSIONS).write_text(text_of(SUBMISSIONS))
    four = [line for line in lines if '"nanotron-' in line][:4]
    (place / "four.jsonl").write_text("\n".join(four) + "\n")
    row = json.loads(blocks(text_of("docs/validate.md"), "json")[0])
    (place / "mine.jsonl").write_text(json.dumps(row) + "\n")
    shutil.copytree(ROOT / "configs" / "calibration", place / "constants")
    shutil.copytree(ROOT / "configs" / "phases", place / "configs" / "phases")
    shutil.copytree(ROOT / "profiles" / "hetu", place / "profiles" / "hetu")
    (place / "theirs.json").write_text(json.dumps(found("llama2-7b")[0].plan))
    (place / "hosts").write_text("node-a slots=8\nnode-b slots=8\n")
    (place / "my-llama").mkdir()
    (place / "my-llama" / "config.json").write_text(json.dumps(LLAMA))


def _train(place: Path) -> None:
    script: dict[str, Any] = run_page(place, "train.py")
    model, batch = script["make_model"]()
    adapt = Adapt(window=2, warm_up=0, log="adapt.jsonl", steps=STEPS)
    parallel = auto_parallelize(model, batch, plan="plan.yaml", adapt=adapt, log="runs/first", device="cpu")
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
    for _ in range(STEPS):
        parallel.train_step(batch, optimizer)
    parallel.save("checkpoints/step-100", optimizer)


def place_of(page: str, made: Path, folder: Path) -> Path:
    """A copy of the folder, with what a page has of its own."""
    place = Path(shutil.copytree(made, folder / Path(page).stem))
    hand = blocks(text_of(page), "yaml")
    if page in PLANS and not PLANS[page]:
        (place / "plan.yaml").write_text(hand[0])
    elif page in PLANS:
        with chdir(place):
            galvatron(PLANS[page])
    return place
