"""Pages that are made: the support matrix, scores, the API; and links."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest

import galvatron_lite
from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.errors import InputError
from galvatron_lite.validate.results import ScoredRun, Skipped, macro, score_families
from tests.docs.pages import PAGES, ROOT, anchors, blocks, code, links, named, text_of

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)

def make():
    return Model(), {"x": torch.randn(4, 6, 8), "y": torch.randn(4, 6, 8)}
"""


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import support_matrix

        yield support_matrix


@pytest.fixture
def own(script: ModuleType, tmp_path: Path) -> Any:
    (tmp_path / "mine.py").write_text(MODEL)
    return script.own_family(f"{tmp_path / 'mine.py'}:make")


def ways_named(script: ModuleType, *names: str) -> list[Any]:
    return [way for way in script.WAYS if way.name in names]


def test_the_page_is_that_of_the_data(script: ModuleType) -> None:
    import support_matrix_page as page

    data = json.loads(text_of("docs/data/support.json"))
    text = text_of("docs/support.md")
    assert page.page_of(text, data) == text, "run scripts/support_matrix --page"
    # One cell of the table by hand, and every family somewhere on the page.
    names = [way.name for way in script.WAYS]
    line = next(line for line in text.splitlines() if line.startswith("| llama |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
    state = data["families"]["llama"]["ways"]["tensor"]["state"]
    assert cells[names.index("tensor")].startswith("yes") == (state == "works")
    assert all(f"| {name} |" in text for name in data["families"])
    assert set(script.NAMED) >= {"llama", "qwen2", "qwen3", "mistral", "mixtral", "gpt2", "bert", "vit", "t5"}


def test_a_family_from_its_configuration(script: ModuleType) -> None:
    ways = ways_named(script, "zero3", "tensor+sp", "1f1b", "expert")
    row = script.in_a_process(lambda: script.build("llama"), ways)
    assert row["model"] == "LlamaForCausalLM"
    assert row["blocks"] == 2
    assert {way: one["state"] for way, one in row["ways"].items()} == dict.fromkeys(
        ("zero3", "tensor+sp", "1f1b"), "works"
    )


def test_what_differs_fails_or_is_refused_is_told(
    script: ModuleType, own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import support_matrix_trial as trial

    graph, (way,) = script.capture(own), ways_named(script, "data")
    reference = trial.train_alone(own)
    assert trial.try_way(own, graph, way, reference).state is trial.State.WORKS
    shifted = replace(reference, losses=[reference.losses[0], 1.1 * reference.losses[1]])
    monkeypatch.setattr(trial, "train_alone", lambda _family: shifted)  # in float64, too
    found = trial.try_way(own, graph, way, shifted)
    assert (found.state, found.why.startswith("step 2: the loss is")) == (trial.State.WRONG, True)
    turned = [dict(one) for one in reference.gradients]
    turned[0]["blocks.1.up.bias"] = -turned[0]["blocks.1.up.bias"]
    monkeypatch.setattr(trial, "train_alone", lambda _family: replace(reference, gradients=turned))
    found = trial.try_way(own, graph, way, replace(reference, gradients=turned))
    assert "step 1: the gradient of blocks.1.up.bias is off" in found.why

    def failing(error: Exception) -> Callable[..., None]:
        def fail(*_: Any, **__: Any) -> None:
            raise error

        return fail

    monkeypatch.setattr(trial, "ParallelModel", failing(InputError("plan", "it", "Not so.")))
    found = trial.try_way(own, graph, way, reference)
    assert (found.state, found.why) == (trial.State.NO, "plan: 'it' cannot be used. Not so.")
    monkeypatch.setattr(trial, "ParallelModel", failing(ZeroDivisionError("by zero")))
    found = trial.try_way(own, graph, way, reference)
    assert (found.state, found.why) == (trial.State.CRASHES, "ZeroDivisionError: by zero")


def test_rows_are_kept_and_gone_on_with(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def tried(make: Any, _ways: Any) -> dict[str, Any]:
        made.append(make.args[0])
        if len(made) == 2:
            raise KeyboardInterrupt
        return {"model": "M", "layers": 1, "blocks": 0, "ways": {"data": {"state": "works", "why": ""}}}

    monkeypatch.setattr(script, "in_a_process", tried)
    path = tmp_path / "support.journal"
    assert list(script.run(["a", "b"], script.WAYS, script.Journal(path, "x"), True)) == ["a"]
    rows = script.run(["a", "b"], script.WAYS, script.Journal(path, "x"), True)
    assert (list(rows), made) == (["a", "b"], ["a", "b", "b"])
    # Ways that are not tried again stay as they were.
    before = script.kept({}, rows, script.WAYS)
    fewer = {"a": {"model": "M", "layers": 1, "blocks": 0, "ways": {"zero3": {"state": "no", "why": "so"}}}}
    after = script.kept(before, fewer, ways_named(script, "zero3"))
    assert {way: one["state"] for way, one in after["families"]["a"]["ways"].items()} == {
        "data": "works",
        "zero3": "no",
    }


@pytest.fixture(scope="module")
def scores_script() -> ModuleType:
    """``scripts/docs_scores.py``, which writes the tables."""
    spec = importlib.util.spec_from_file_location("docs_scores", ROOT / "scripts" / "docs_scores.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return dict(json.loads(text_of("profiles/published/scores.json")))


@pytest.fixture(scope="module")
def judged(scores_script: ModuleType) -> list[ScoredRun]:
    """Every published run, priced with the shipped constants."""
    return list(scores_script.judged())


def test_the_tables_are_those_of_the_scores_file(scores_script: ModuleType, data: dict[str, Any]) -> None:
    for page, name, table in scores_script.PAGES:
        text = page.read_text(encoding="utf-8")
        assert scores_script.replaced(text, name, table(data)) == text, f"{page}: run scripts/docs_scores"


def test_figures_of_the_table_by_hand(scores_script: ModuleType, data: dict[str, Any]) -> None:
    """One row and one mean, without the script's own code."""
    shipped = data["shipped"]
    line = next(row for row in text_of("docs/costs.md").splitlines() if row.startswith("| vtrain-single |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    one = shipped["vtrain-single"]
    assert cells[1:6] == ["720", "720", *(f"{one[name]:.1f}" for name in ("time_mape", "time_median", "time_bias"))]
    means = [scores["time_mape"] for scores in shipped.values() if scores["time_mape"] is not None]
    total = next(row for row in text_of("docs/costs.md").splitlines() if row.startswith("| **mean of all"))
    assert total.split("|")[4].strip() == f"{sum(means) / len(means):.1f}"
    # Vacant cells are where nothing is scored, not lost figures.
    folds = [data["families"]["vtrain-single"].get(way, {}) for way in ("without model", "without family")]
    known = [
        *(fold.get("time_mape") for fold in folds),
        *(one[name] for name in ("memory_mape", "group_spearman", "regret")),
    ]
    assert sum(not cell for cell in cells) == known.count(None)


@pytest.mark.study
def test_every_published_row_is_counted(judged: list[ScoredRun]) -> None:
    rows = len(text_of("profiles/published/runs.jsonl").splitlines())
    reasons = [one.outcome.reason for one in judged if isinstance(one.outcome, Skipped)]
    assert not [reason for reason in reasons if "internal error" in reason or "does not fit" in reason]
    assert sum(one.scored for one in judged) > 0.6 * len(judged)
    scores = score_families(judged)
    failed = sum(bool(one.run.oom) and not one.scored and not isinstance(one.outcome, Skipped) for one in judged)
    assert len(judged) == rows == sum(family.rows for family in scores.values())
    assert sum(family.scored + sum(family.skipped.values()) for family in scores.values()) + failed == rows


@pytest.mark.study
def test_the_scores_file_is_of_the_shipped_constants(judged: list[ScoredRun], data: dict[str, Any]) -> None:
    scores = score_families(judged)
    assert list(data["shipped"]) == list(scores)
    assert {name: one["rows"] for name, one in data["shipped"].items()} == {n: one.rows for n, one in scores.items()}
    told = [one["time_mape"] for one in data["shipped"].values() if one["time_mape"] is not None]
    found = macro(scores.values())["time_mape"]
    assert found is not None
    assert sum(told) / len(told) == pytest.approx(found, abs=0.5), "run scripts/docs_scores --refresh"


@pytest.mark.study
def test_the_error_told_of_image_networks_is_that_of_their_runs(judged: list[ScoredRun]) -> None:
    """A mean over families of means over runs, without the script's own code."""
    errors: dict[str, list[float]] = {}
    for one in judged:
        if one.time is not None and one.run.image_size is not None and one.run.seq_len is None:
            errors.setdefault(one.run.family, []).append(abs(one.time - 1))
    found = fmean(fmean(each) for each in errors.values())
    assert load_calibration().expected_error["images"] == pytest.approx(found, abs=2e-3), (
        "scripts/docs_scores --refresh"
    )


def test_the_figure_is_of_these_runs() -> None:
    path = ROOT / "docs" / "predicted-vs-measured.svg"
    assert path.stat().st_size < 400_000
    root = ET.fromstring(path.read_text(encoding="utf-8"))
    words = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    shipped = json.loads(text_of("profiles/published/scores.json"))["shipped"]
    assert {f"{name} ({one['timed']})" for name, one in shipped.items() if one["timed"]} <= words
    assert {f"{one['time_median']:.1f} %" for one in shipped.values() if one["timed"]} <= words


def test_the_reference_has_every_public_name() -> None:
    spec = importlib.util.spec_from_file_location("docs_api", ROOT / "scripts" / "docs_api.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    lines = set(script.page().splitlines())
    assert {f"### `galvatron_lite.{name}`" for name in galvatron_lite.__all__} <= lines


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page.read_text(encoding="utf-8")):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            text = (target / "README.md" if target.is_dir() else target).read_text(encoding="utf-8")
            assert anchor in anchors(text), link


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=named)
def test_files_that_are_named_exist(page: Path) -> None:
    """``profiler/roofline.py`` is a module of the package, ``tests/...`` a file of the checkout."""
    paths = [
        span for span in code(page.read_text(encoding="utf-8")) if re.fullmatch(r"[\w*]+(/[\w*]+)+(\.\w+)?/?", span)
    ]
    for path in paths:
        found = [
            root for root in (ROOT, ROOT / "galvatron_lite") if list(root.glob(path)) or list(root.glob(f"{path}.py"))
        ]
        assert found, path


def test_every_page_is_in_the_index() -> None:
    listed = links((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= set(listed)
    assert "docs/README.md" in links((ROOT / "README.md").read_text(encoding="utf-8"))


def test_every_folder_is_in_the_design() -> None:
    listed = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("## The folders")[1].split("\n## ")[0]
    package = ROOT / "galvatron_lite"
    found = [path.parent for at in ("*", "runtime/*", "parallelism/*") for path in package.glob(f"{at}/__init__.py")]
    assert len(found) > 40
    assert [path.name for path in found if not re.search(rf"(?<![\w/]){path.name}/", listed)] == []


def test_diffs_of_the_guide_are_in_the_code() -> None:
    diffs = "".join(blocks(text_of("CONTRIBUTING.md"), "diff"))
    assert len(re.findall(r"^\+\+\+ ", diffs, re.MULTILINE)) > 5
    for part in diffs.split("+++ ")[1:]:
        name, *lines = part.splitlines()
        written = set(text_of(name).splitlines())
        assert [line for line in lines if line[1:] not in written] == [], name
