"""Delayed gradients from the command line: allowed, pinned, priced."""

from __future__ import annotations

from pathlib import Path

import pytest

from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.plans.io import read_plan
from galvatron_lite.plans.schema import Cyclic
from tests.cli.conftest import Galvatron

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
def test_refused(galvatron: Galvatron, pins: list[str], said: str) -> None:
    status, _, err = galvatron("plan", *SMALL, *pins)
    assert status == 1
    assert said in " ".join(err.split())


def test_other_questions_take_it_too(galvatron: Galvatron) -> None:
    pins = ["--allow-delay", "--fix", "setting=data", "--fix", "rule=v2", "--best-batch", "--max-batch", "6"]
    status, out, _ = galvatron("plan", *SMALL[:-2], *pins)
    assert status == 0
    assert "delayed gradients (cdp-v2, data)" in out
