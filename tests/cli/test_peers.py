"""Commands that read other planners' files, and the one that prices any plan."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from galvatron_lite import api
from galvatron_lite.cli import app
from galvatron_lite.errors import InputError
from galvatron_lite.plans.io import read_plan, write_plan
from studies.hetu.formulas import price
from tests.studies.hetu.cases import FOLDER, found


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
    output = run("evaluate", path, "--profile", profile, "--mem", "16GB").output
    assert "layers.0 … layers.31 (32)" in output
    assert "fits: no, " in output
    assert "of 14.9 GiB; too full: stage 0" in output
    assert "galvatron can run it: yes" in output
    assert "off by" not in output
    assert "fits: yes, " in run("evaluate", path, "--profile", profile).output


def test_the_model_may_be_estimated(tmp_path: Path) -> None:
    path = tmp_path / "hand.yaml"
    path.write_text("devices: 8\nglobal_batch: 64\nmicrobatches: 8\nruns: [{layers: '*', strategy: zero3x8}]\n")
    done = run("evaluate", path, "--model", "gpt2", "--cluster", "a100-80gb", "--gpus", 8, "--json")
    assert json.loads(done.output)["provenance"]["proof"] == "given"


@pytest.fixture
def hand(tmp_path: Path) -> Path:
    path = tmp_path / "hand.yaml"
    path.write_text("devices: 8\nglobal_batch: 64\nmicrobatches: 8\nruns: [{layers: '*', strategy: zero2x8}]\n")
    return path


LLAMA = ("--model", "llama2-7b", "--cluster", "a100-80gb")


def test_evaluate_says_whether_it_fits_and_how_far_off_it_may_be(hand: Path) -> None:
    output = run("evaluate", hand, *LLAMA, "--gpus", 8, "--mem", "75%").output
    figures = re.search(r"fits: yes, ([\d.]+) GiB of ([\d.]+) GiB", output)
    assert float(figures[1]) < float(figures[2])
    assert float(figures[2]) == pytest.approx(80 * 0.75, rel=0.02)
    assert "estimated step times of language models are off by" in output
    assert "Note" not in output


def test_evaluate_says_what_galvatron_cannot_run(tmp_path: Path) -> None:
    path = tmp_path / "split.yaml"
    strategies = {"before": "data8", "layers.*": "data8 selective offload-activations", "after": "data8"}
    runs = [{"layers": layers, "strategy": strategy} for layers, strategy in strategies.items()]
    path.write_text(json.dumps({"devices": 8, "global_batch": 64, "microbatches": 4, "runs": runs}))
    assert "galvatron can run it: no. " in run("evaluate", path, *LLAMA, "--gpus", 8).output


def test_another_batch_keeps_the_size_of_micro_batches(hand: Path, tmp_path: Path) -> None:
    twice = tmp_path / "twice.yaml"
    twice.write_text(hand.read_text().replace("64", "128").replace("microbatches: 8", "microbatches: 16"))
    rescaled = json.loads(run("evaluate", hand, *LLAMA, "--gpus", 8, "--batch", 128, "--json").output)
    written = json.loads(run("evaluate", twice, *LLAMA, "--gpus", 8, "--json").output)
    assert rescaled["provenance"].pop("notes") == ["the plan is of batch 64 in 8 micro-batches, priced at 128 in 16"]
    assert rescaled == written
    with pytest.raises(InputError, match=r"--batch: 100 .* 8 samples"):
        run("evaluate", hand, *LLAMA, "--gpus", 8, "--batch", 100)


def test_evaluate_takes_the_devices_of_the_plan(hand: Path) -> None:
    for gpus in (4, 16):
        with pytest.raises(InputError, match=f"--gpus: {gpus} .* for 8 devices"):
            run("evaluate", hand, *LLAMA, "--gpus", gpus)
    profile = api.find_profile(model="llama2-7b", cluster="a100-80gb", gpus=4)
    with pytest.raises(InputError, match=r"plan, devices: 8 .* has 4"):
        api.evaluate(hand, profile)
    larger = api.find_profile(model="llama2-7b", cluster="a100-80gb", gpus=16)
    plan = api.evaluate(hand, larger, mem="20GB")
    assert plan.provenance.notes == ("the plan takes 8 of the 16 devices of a100-80gb",)
    assert plan.provenance.budget == 20 * 10**9
    assert (plan.fits, plan.overfull) == (False, (0,))


def test_evaluate_says_that_the_plan_is_of_another_model(hand: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours.yaml"
    run("evaluate", hand, *LLAMA, "--gpus", 8, "-o", ours)
    other = ("--model", "llama3-8b", "--cluster", "a100-80gb", "--gpus", 8)
    output = run("evaluate", ours, *other).output
    assert "Note: the plan is of llama2-7b, priced for llama3-8b." in output
    assert "Note: the plan is" not in run("evaluate", hand, *other).output
    smaller = ours.with_name("smaller.yaml")
    smaller.write_text(ours.read_text().replace("last: after", "last: layers.30"))
    with pytest.raises(InputError, match=r"The plan is of llama2-7b, profile .* of llama3-8b"):
        run("evaluate", smaller, *other)


def test_a_strategy_without_figures_is_refused_with_those_that_exist(hand: Path) -> None:
    text = hand.read_text()
    for strategy, said in (
        ("zero2x8 recompute", "with recompute none only"),
        ("zero2x4 tensor2", "with tensor 1, 3, 4 only"),
    ):
        hand.write_text(text.replace("zero2x8", strategy))
        profile = api.find_profile(model="llama2-7b", cluster="a100-80gb", gpus=8)
        held = tuple(point for point in profile.layers if point.tensor in (1, 3, 4))
        with pytest.raises(InputError, match=rf"strategy of before: .* {said}"):
            api.evaluate(hand, replace(profile, layers=held))


def test_a_file_of_theirs_keeps_its_devices_and_batch(theirs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--gpus: 16 .* for 8 devices"):
        run("evaluate", theirs, *LLAMA, "--gpus", 16)
    for option in ("--gpus", "--batch"):
        with pytest.raises(InputError, match=f"{option}: 16"):
            run("plan", "import", "--from", "hetu", theirs, option, 16, "-o", tmp_path / "plan.yaml")


def test_a_plan_that_their_files_cannot_hold_is_refused_with_what_to_pin(tmp_path: Path) -> None:
    ours, again, back = tmp_path / "ours.yaml", tmp_path / "again.yaml", tmp_path / "back.json"
    request = ("plan", *LLAMA, "--gpus", 8, "--batch", 64, "--mem", "40GB", "--best", 0)
    run(*request, "--fix", "before.zero=2", "--fix", "after.zero=3", "-o", ours)
    with pytest.raises(InputError, match=r"It must be that of before.* comes of: galvatron plan \.\.\. ") as refused:
        run("plan", "export", "--to", "hetu", ours, "-o", back)
    run(*request, *refused.value.remedy.split("galvatron plan ... ")[1].split(), "-o", again)
    assert run("plan", "export", "--to", "hetu", again, "-o", back).exit_code == 0
    priced = [
        json.loads(run("evaluate", path, *LLAMA, "--gpus", 8, "--json").output)["prediction"] for path in (again, back)
    ]
    assert priced[1]["step_seconds"] == pytest.approx(priced[0]["step_seconds"], rel=0.05)


def test_an_import_says_where_it_is_and_is_the_last_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = run("profile", "import", "--from", "hetu", FOLDER / "bert-large").output
    where = re.search(r"Written to (profiles/\S+\.yaml)\.\nIt is the last profile made here", output)
    assert (tmp_path / where[1]).is_file()
    assert (tmp_path / "profiles" / "last").read_text().strip() == where[1].removeprefix("profiles/")


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


def test_evaluate_takes_the_profile_that_the_plan_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = api.plan(model="gpt2", cluster="a100-40gb", gpus=8, batch=64, runners_up=0)
    write_plan(plan, tmp_path / "plan.yaml")
    other = api.profile("gpt2", estimate=True, cluster="h100", gpus=8)  # the last one made here
    priced = [api.evaluate("plan.yaml", profile).prediction for profile in (None, other)]
    assert plan.prediction is not None
    assert [one is not None and one.step_seconds == plan.prediction.step_seconds for one in priced] == [True, False]
