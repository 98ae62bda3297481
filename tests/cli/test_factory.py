from __future__ import annotations

from pathlib import Path

import pytest

from galvatron_lite.capture.named import graph_named, load_factory
from galvatron_lite.errors import InputError
from galvatron_lite.model.zoo import build

SOURCE = """
from torch import nn, zeros
def alone(): return nn.Linear(2, 2)
def pair(): return nn.Linear(2, 2), zeros(3, 2)
def triple(): return nn.Linear(2, 2), zeros(3, 2), lambda output, batch: output.mean()
def wrong(): return 7
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(("name", "given"), [("alone", 1), ("pair", 2), ("triple", 3)])
def test_what_a_factory_may_return(script: Path, name: str, given: int) -> None:
    made = load_factory(f"{script}:{name}")
    assert [part is not None for part in made] == [index < given for index in range(3)]


@pytest.mark.parametrize(("name", "said"), [("wrong", "not an nn.Module"), ("none", "no function 'none'")])
def test_what_it_may_not(script: Path, name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_factory(f"{script}:{name}")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file"):
        load_factory(f"{tmp_path}/none.py:make")


def test_a_plan_of_a_model_of_ones_own(tmp_path: Path) -> None:
    script = tmp_path / "model.py"
    script.write_text(
        "from galvatron_lite.model.zoo import build\n"
        "def make(): return build('gpt-tiny', layers=2, hidden=32, heads=2, sequence=8)\n"
    )
    graph = graph_named(f"{script}:make", precision="fp32")
    model = build("gpt-tiny", layers=2, hidden=32, heads=2, sequence=8)
    assert graph.parameters == sum(one.numel() for one in model.parameters())
    with pytest.raises(InputError, match="--seq"):
        graph_named(f"{script}:make", sequence=16)
