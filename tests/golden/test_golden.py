"""What the commands print is what it was, to the last digit.

``GOLDEN=1 pytest tests/golden`` writes the files anew; read their diff.
"""

from __future__ import annotations

import os
import re
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from galvatron_lite.cli import app

HERE = Path(__file__).parent
MODEL = """
from galvatron_lite.model.zoo.gpt import GPT, GPTConfig
def make_model():
    return GPT(GPTConfig(vocab=32, layers=2, hidden=32, heads=4, sequence=16))
"""
BY_HAND = """
model: gpt2
devices: 4
global_batch: 16
microbatches: 4
stages:
- runs:
  - {layers: before, strategy: zero1x2}
  - {layers: layers.0..layers.5, strategy: tensor2+sp recompute}
- runs:
  - {layers: layers.6..layers.11, strategy: zero2x2 selective}
  - {layers: after, strategy: data2}
"""
GPT2 = ("--model", "gpt2", "--cluster", "a100-80gb", "--gpus", "2")
OWN = ("--model", "train.py:make_model")
IMAGES = ("--model", "resnet50", "--cluster", "v100", "--gpus", "2")
CASES = {
    "plan": ("plan", *GPT2, "--batch", "8", "-o", "plan.yaml"),
    "plan-pipeline": ("plan", *GPT2, "--batch", "8", "--fix", "pp=2", "--forbid", "tp", "-o", "two.yaml"),
    "plan-pictures": ("plan", *IMAGES, "--batch", "64", "--fix", "pp=1"),
    "plan-fewest": ("plan", *GPT2, "--batch", "8", "--forbid", "tp", "--tokens", "150K"),
    "plan-own-model": ("plan", *OWN, *GPT2[2:], "--batch", "8", "--fix", "tp=2", "-o", "small.yaml"),
    "plan-too-large": ("plan", *GPT2, "--batch", "8", "--fix", "dp=2", "--mem", "1GB"),
    "evaluate": ("evaluate", "plan.yaml", "--batch", "16", "--mem", "4GB"),
    "evaluate-by-hand": ("evaluate", "hand.yaml", *GPT2[:-1], "4"),
    "explain": ("explain", "plan.yaml"),
    "report": ("report", "two.yaml", "-o", "report.html"),
    "verify": ("verify", "small.yaml", *OWN, "--checks", "dry"),
    "validate": ("validate", "--family", "torchgpipe", "--worst", "3"),
}
"""Run in this order in one folder, as later ones read what earlier ones write."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case prints."""
    folder = tmp_path_factory.mktemp("golden")
    (folder / "train.py").write_text(MODEL)
    (folder / "hand.yaml").write_text(BY_HAND)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "120")
        texts = {name: told(*words) for name, words in CASES.items()}
        page = Path("report.html").read_text(encoding="utf-8")
    texts["report"] += shown(page)
    return texts


def told(*words: str) -> str:
    """The output of a command, or its error."""
    done = CliRunner().invoke(app, list(words))
    return re.sub(r"in \S+ \S+ of processor time", "in a while", done.output) or f"{done.exception}\n"


def shown(page: str) -> str:
    """The words of a page, a line a row or paragraph."""
    text = re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.S)
    text = re.sub(r"</(tr|p|h\d|li|text|dd|title|summary)>", "\n", text)
    lines = (" ".join(line.split()) for line in unescape(re.sub(r"<[^>]*>", " ", text)).splitlines())
    return "\n".join(filter(None, lines)) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_it_prints_what_it_did(name: str, printed: dict[str, str]) -> None:
    path, text = HERE / f"{name}.txt", re.sub(r" +$", "", printed[name], flags=re.M)
    if os.environ.get("GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
