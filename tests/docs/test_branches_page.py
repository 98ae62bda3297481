"""Everything that the page on branches shows is run, in its order, and prints what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from galvatron_lite.cli import app
from tests.docs.branch_page import run_page, train
from tests.docs.pages import text_of
from tests.pool import WorkerPool

PAGE = text_of("docs/branches.md")
BLOCKS = [match[1] for match in re.finditer(r"^```\w*\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)]
FILES = {match[1]: block for block in BLOCKS if (match := re.match(r"# (\S+\.\w+)\n", block))}
SHOWN = [block.removeprefix("$ ").splitlines() for block in BLOCKS if block.startswith("$ ")]
NUMBER = re.compile(r"\d[\d.,]*")
CLOSE = 0.1
"""Shown figures may be off by that share: constants of the estimates are refined; words may not."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, and those that its commands write."""
    place = tmp_path_factory.mktemp("branches")
    for name, text in FILES.items():
        (place / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("COLUMNS", "200")
        for command, *lines in SHOWN:
            done = CliRunner().invoke(app, shlex.split(command)[1:])
            assert done.exit_code == 0, done.output
            assert not missing(lines, done.output.splitlines()), done.output
    return place


def missing(wanted: list[str], printed: list[str]) -> list[str]:
    """Lines that are not printed, in their order."""
    rest = iter(printed)
    return [line for line in wanted if line != "…" and not any(alike(line, other) for other in rest)]


def alike(shown: str, printed: str) -> bool:
    """Whether two lines have the same words, and nearly the same numbers."""
    left, right = (" ".join(line.split()) for line in (shown, printed))
    if NUMBER.sub("#", left) != NUMBER.sub("#", right):
        return False
    pairs = zip(NUMBER.findall(left), NUMBER.findall(right), strict=True)
    return all(value(one) == pytest.approx(value(other), rel=CLOSE) for one, other in pairs)


def value(text: str) -> float:
    return float(text.replace(",", "").rstrip("."))


def test_lines_are_compared() -> None:
    assert alike("a  1.5 ms, x", "a 1.55 ms, x")
    assert not alike("a 1.5 ms", "a 2.5 ms")
    assert not alike("a 1.5 ms", "a 1.5 us")
    assert missing(["a", "…", "c"], ["a", "b", "d"]) == ["c"]


def test_the_page_has_its_parts() -> None:
    assert set(FILES) == {"towers.py", "look.py", "hand.yaml", "train.py"}
    assert len(SHOWN) == 5


def test_branches_are_seen_from_python(folder: Path) -> None:
    assert run_page(folder, "look.py")["found"] == [("user", ("user",)), ("item", ("item",))]


def test_training_is_that_of_one_process(folder: Path, pool: WorkerPool) -> None:
    losses, state = alone(folder)
    for found, own in pool.run(2, train, folder=folder, timeout=60):
        assert found == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(own, state, rtol=1e-4, atol=1e-5)


def alone(folder: Path) -> tuple[list[float], dict[str, Any]]:
    """The page's training, by torch alone."""
    model, batch = run_page(folder, "towers.py")["make_model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()
