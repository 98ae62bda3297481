"""Plans for another tool and with delayed gradients, tables of profiles, and the factories of models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from galvatron_lite import api, explain
from galvatron_lite.capture.named import load_factory
from galvatron_lite.cli import app
from galvatron_lite.cli.profile import best_gain, figures_of, show_profile
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.branch.find import find_regions
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.plans.export.tools import TOOLS, export
from galvatron_lite.plans.io import read_plan
from galvatron_lite.plans.schema import Cyclic
from galvatron_lite.profiler.schema import Profile
from tests.branchy import plain_profile
from tests.cli.conftest import Galvatron

MODEL = ("--layers", "4", "--hidden", "1024", "--heads", "16", "--vocab", "32000", "--seq", "1024")
WHERE = ("--cluster", "h100", "--gpus", "8", "--batch", "64", "--mem", "6GB")


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_the_settings_say_all_of_the_plan(tool: str, tmp_path: Path) -> None:
    file = tmp_path / "settings"
    result = CliRunner().invoke(app, ["plan", *MODEL, *WHERE, "--for", tool, "-o", str(file)])
    assert result.exit_code == 0, result.output
    assert file.read_text()
    assert "Not among" not in result.output


def test_costs_are_those_of_the_software() -> None:
    request = {"model": "llama3-8b", "cluster": "h100", "gpus": 8, "batch": 16, "mem": "80GB", "runners_up": 0}
    ours, theirs = (api.plan(backend=name, **request) for name in ("galvatron", "megatron"))  # type: ignore[arg-type]
    assert theirs.prediction.step_seconds < ours.prediction.step_seconds  # fused kernels
    assert export(theirs, "megatron", strict=True).text


def test_a_plan_for_other_software_is_explained_with_its_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = api.plan(model="gpt2", cluster="h100", gpus=8, batch=64, mem="80GB", backend="megatron", runners_up=0)
    assert plan.provenance.stack == "megatron-core"
    assert explain(plan, what_if=False).step_seconds == pytest.approx(plan.prediction.step_seconds)  # type: ignore[union-attr]


@pytest.mark.parametrize("tool", ["megatron", "nemo", "torchtitan"])
def test_software_for_transformers_gets_no_convolutional_network(tool: str) -> None:
    with pytest.raises(InputError, match=f"'{tool}' cannot be used. It trains no convolutional networks"):
        api.plan(model="resnet50", cluster="h100", gpus=8, target=tool)


SECONDS, ITEMS = (0.5, 0.25, 0.125), (100, 70, 30)


@pytest.fixture
def profile() -> Profile:
    return plain_profile(SECONDS, parameters=ITEMS)


def test_figures_without_measurements_are_left_out(profile: Profile) -> None:
    some = replace(profile, layers=tuple(point for point in profile.layers if point.kind != "t1" or point.samples > 1))
    (region,) = find_regions(some.graph)
    assert [one.seconds is None for one in figures_of(some, region)] == [False, True, False]
    assert best_gain(some, region) == 0.0


def test_the_printed_profile(profile: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    show_profile(profile, "here.yaml")
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.split()[:3] == ["t0", "1", "100"])
    assert row.split()[3:7] == ["500", "ms", "1", "s"]
    assert "Independent of one another: t0, t1, t2: at the same time at most 1.75x as fast" in printed


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
    parts = load_factory(f"{script}:{name}")
    assert [part is not None for part in parts] == [index < given for index in range(3)]


@pytest.mark.parametrize(("name", "said"), [("wrong", "not an nn.Module"), ("none", "no function 'none'")])
def test_factories_that_return_something_else_are_refused(script: Path, name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_factory(f"{script}:{name}")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file"):
        load_factory(f"{tmp_path}/none.py:make")


SMALL = ["--model", "vgg16", "--cluster", "a100-40gb", "--gpus", "3", "--batch", "24"]


def test_the_plan_says_that_the_rule_changes(galvatron: Galvatron, tmp_path: Path) -> None:
    target = tmp_path / "plan.yaml"
    pins = ["--allow-delay", "--fix", "rule=v1", "--fix", "setting=data", "-v", "-o", str(target)]
    status, out, _ = galvatron("plan", *SMALL, *pins)
    assert status == 0
    for said in (
        "vgg16 on 3 devices: delayed gradients (cdp-v1, data) in 3 stages, batch 24 in 3 micro-batches of 8",
        "Note: trains by delayed gradients: the rule changes, CDP-v1: every micro-batch uses the parameters of the",
        "Note: a run begins with 4 time steps, ",
        "  0 … 2 (3) ███",
        "Note: the slowest of the 3 stages takes ",
        "without delay: ",
    ):
        assert said in out
    assert " where links between nodes " not in out  # the range of a plan without delay is not this one's
    plan = read_plan(target)
    assert plan.cyclic == Cyclic(CyclicRule.V1, CyclicSetting.DATA)
    status, out, _ = galvatron("evaluate", target, "--model", "vgg16", "--cluster", "a100-40gb", "--batch", "48")
    assert status == 0
    assert "batch 48 in 3 micro-batches of 16" in out
    assert "galvatron can run it: yes" in out
    assert "the rule changes" in out
    status, _, err = galvatron("plan", "export", target, "--to", "hetu", "-o", tmp_path / "their.json")
    assert status == 1
    assert "cyclic" in err


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        (["--fix", "rule=cdp-v2"], "Allow that: --allow-delay."),
        (["--fix", "setting=stages"], "Allow that: --allow-delay."),
        (["--fix", "schedule=cyclic"], "Allow that: --allow-delay."),
        (["--allow-delay", "--schedule", "cyclic"], "--allow-delay --fix schedule=cyclic"),
        (["--allow-delay", "--fix", "rule=cdp-v3"], "Known: cdp-v1, cdp-v2"),
        (["--allow-delay", "--fix", "setting=ring"], "Known: single, data, stages"),
        (["--allow-delay", "--fix", "setting=single"], "it is of one device, not 3"),
        (["--allow-delay", "--fix", "setting=data", "--mode", "inference"], "in training only"),
    ],
)
def test_options_that_contradict_are_refused(galvatron: Galvatron, pins: list[str], said: str) -> None:
    status, _, err = galvatron("plan", *SMALL, *pins)
    assert status == 1
    assert said in " ".join(err.split())


def test_other_commands_take_the_option_too(galvatron: Galvatron) -> None:
    pins = ["--allow-delay", "--fix", "setting=data", "--fix", "rule=v2", "--best-batch", "--max-batch", "6"]
    status, out, _ = galvatron("plan", *SMALL[:-2], *pins)
    assert status == 0
    assert "delayed gradients (cdp-v2, data)" in out
