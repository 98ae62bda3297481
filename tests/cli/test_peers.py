"""Commands that read other planners' files, and the one that prices any plan."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from galvatron_lite.cli import app
from galvatron_lite.errors import InputError
from galvatron_lite.peers.hetu.formulas import price
from galvatron_lite.plans.io import read_plan
from tests.peers.hetu.cases import FOLDER, found


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imported") / "llama.yaml"
    done = run("profile", "import", "--from", "hetu", FOLDER / "llama2-7b", "-o", path)
    assert done.exit_code == 0
    assert "6.79B parameters in 34 layers, 8 x gpu" in done.output
    return path


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    path = tmp_path / "galvatron_config.json"
    path.write_text(json.dumps(found("llama2-7b")[0].plan))
    return path


def test_a_plan_goes_from_hetu_to_ours_and_back(profile: Path, theirs: Path, tmp_path: Path) -> None:
    ours, back = tmp_path / "plan.yaml", tmp_path / "back.json"
    assert run("plan", "import", "--from", "hetu", theirs, "--profile", profile, "-o", ours).exit_code == 0
    assert read_plan(ours).prediction is not None
    assert run("plan", "export", "--to", "hetu", ours, "-o", back).exit_code == 0
    assert json.loads(back.read_text()) == json.loads(theirs.read_text())


def test_imported_plans_are_priced_alike_either_way(profile: Path, theirs: Path, tmp_path: Path) -> None:
    ours = tmp_path / "plan.yaml"
    run("plan", "import", "--from", "hetu", theirs, "--profile", profile, "-o", ours)
    answers = [
        json.loads(run("evaluate", path, "--profile", profile, "--mem", "16GiB", "--json").output)
        for path in (ours, theirs)
    ]
    assert answers[0] == answers[1]
    search, model, hardware = found("llama2-7b")
    assert answers[0]["fits"]
    seconds = price(model, hardware, search.hetu_plan()).seconds
    assert answers[0]["prediction"]["step_seconds"] == pytest.approx(seconds, rel=0.03)


def test_a_plan_by_hand(profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "hand.yaml"
    path.write_text(
        "devices: 8\nglobal_batch: 64\nmicrobatches: 4\nruns:\n"
        "- {layers: embed, strategy: zero3x8}\n- {layers: layers.*, strategy: zero3x8 recompute}\n"
        "- {layers: head, strategy: zero3x8}\n"
    )
    told = run("evaluate", path, "--profile", profile, "--mem", "16GB").output
    assert "layers.0 … layers.31 (32)" in told
    assert "It does not fit: stage 0" in told
    assert "does not fit" not in run("evaluate", path, "--profile", profile).output


def test_the_model_may_be_estimated(tmp_path: Path) -> None:
    path = tmp_path / "hand.yaml"
    path.write_text("devices: 8\nglobal_batch: 64\nmicrobatches: 8\nruns: [{layers: '*', strategy: zero3x8}]\n")
    done = run("evaluate", path, "--model", "gpt2", "--cluster", "a100-80gb", "--gpus", 8, "--json")
    assert json.loads(done.output)["provenance"]["proof"] == "given"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("profile", "import", "--from", "alpa", "x"), "--from"),
        (("profile", "import", "--from", "hetu", FOLDER / "swin-huge"), "--layers"),
        (("profile", "import", "--from", "hetu", FOLDER / "swin-huge", "--layers", "2,2", "--hidden", "1"), "--hidden"),
        (("profile", "import", "--from", "hetu", FOLDER / "llama2-7b", "--nodes", "4"), "allreduce_bandwidth_4nodes"),
        (("profile", "import", "--from", "hetu", FOLDER / "llama2-7b", "--engine", "v1"), "--engine"),
    ],
)
def test_an_error_says_what_is_wrong(words: tuple[object, ...], named: str) -> None:
    with pytest.raises(InputError, match=named):
        run(*words)
