"""What is written for other tools is what they read, and what they cannot be told is listed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from galvatron_lite.cli import app
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.backends import DEEPSPEED
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.export.fields import commented
from galvatron_lite.plans.export.settings import stage_blocks
from galvatron_lite.plans.export.tools import TOOLS, export
from galvatron_lite.plans.io import check_runs, write_plan
from galvatron_lite.plans.schema import BranchPlacement, LayerRun, Mode, Schedule, Stage, TrainedBy
from tests.plans.export.plans import BLOCKS, PLANS, plan

EVERY = sorted(PLANS)


@pytest.mark.parametrize("tool", sorted(TOOLS))
@pytest.mark.parametrize("name", EVERY)
def test_what_a_tool_cannot_express_is_in_comments_and_refused_by_strict(tool: str, name: str) -> None:
    exported = export(PLANS[name], tool)
    if tool == "deepspeed":
        json.loads(exported.text)
    else:
        assert all(f"# not expressed here: {line}\n" in exported.text for line in exported.left_out)
        assert exported.text.endswith("\n")
    if not exported.left_out:
        assert export(PLANS[name], tool, strict=True) == exported
        return
    more = f" (and {len(exported.left_out) - 1} more):" if len(exported.left_out) > 1 else ":"
    with pytest.raises(InputError, match=re.escape(f"{tool} cannot be told of it{more}")):
        export(PLANS[name], tool, strict=True)


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_exported_files_do_not_change_unnoticed(tool: str) -> None:
    """``exported.json`` is what was written before, of the same plans: where it differs, read the difference first."""
    exports = {name: export(PLANS[name], tool) for name in EVERY}
    before = json.loads((Path(__file__).parent / "exported.json").read_text())[tool]
    assert {name: [one.text.splitlines()[1:], list(one.left_out)] for name, one in exports.items()} == before


def test_kinds_of_plans_that_no_tool_has() -> None:
    for tool in TOOLS:
        lines = export(replace(PLANS["data"], mode=Mode.INFERENCE), tool).left_out
        assert any("inference" in line for line in lines)


@pytest.mark.parametrize(("precision", "name"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_torchtitan_gets_the_precision(precision: str, name: str) -> None:
    text = export(replace(PLANS["data"], precision=precision), "torchtitan").text
    assert f"--training.mixed_precision_param {name}\n" in text


def test_accelerate_recomputes_by_fsdp_and_reports_layers_that_differ() -> None:
    for name in ("zero1", "zero2", "zero3", "offload", "deepspeed"):
        kind = "FSDP" if name in ("zero2", "zero3") else "DEEPSPEED"
        assert yaml.safe_load(export(PLANS[name], "accelerate").text)["distributed_type"] == kind
    left_out = {name: " ".join(export(one, "accelerate").left_out) for name, one in PLANS.items()}
    assert [name for name, lines in left_out.items() if "ZeRO stage 1" in lines] == ["tensor"]
    assert "replicas" not in left_out["hybrid"]
    replicas = replace(PLANS["hybrid"], backend=TrainedBy.DEEPSPEED)
    assert any("replicas of shards 2" in line for line in export(replicas, "accelerate").left_out)
    assert not any("recomputation" in line for line in export(PLANS["zero3"], "accelerate").left_out)
    replicas = plan(Strategy(zero=4, zero_stage=2, recompute=Recompute.FULL, offload=Offload.STATES))
    assert any("gradient_checkpointing_enable" in line for line in export(replicas, "accelerate").by_hand)


def test_a_plan_s_own_tool_trains_with_it() -> None:
    assert check_runs(PLANS["deepspeed"], DEEPSPEED) is PLANS["deepspeed"]
    assert [one.blocks for one in stage_blocks(PLANS["odd"])] == [2, 1, 3, 2]
    stages = [json.loads(export(PLANS[name], "deepspeed").text)["zero_optimization"] for name in ("offload", "zero1")]
    assert [one["stage"] for one in stages] == [2, 1]
    zero2, plain, zero3 = (Strategy(zero=4, zero_stage=2), Strategy(data=4), Strategy(zero=4, zero_stage=3))
    runs = [LayerRun(f"layers.{place}", f"layers.{place}", 1, one) for place, one in enumerate((zero2, plain, zero3))]
    first = replace(PLANS["deepspeed"], stages=(Stage(tuple(runs[:2])),))
    assert check_runs(first, DEEPSPEED) is first, "one without anything to shard may be plain"
    with pytest.raises(InputError, match=r"plan, zero_stage of layers.2: 3 .*layers.0 has 2"):
        check_runs(replace(first, stages=(Stage(tuple(runs)),)), DEEPSPEED)
    kept = replace(runs[1], strategy=replace(zero2, offload=Offload.STATES))
    with pytest.raises(InputError, match=r"plan, offload of layers.1"):
        check_runs(replace(first, stages=(Stage((runs[0], kept)),)), DEEPSPEED)
    single = replace(first, schedule=Schedule.ZERO_BUBBLE_1P)
    assert check_runs(single, DEEPSPEED) is single, "one stage has no order of passes"
    assert check_runs(PLANS["zero-bubble"]) is PLANS["zero-bubble"]
    held = [replace(one, strategy=replace(one.strategy, zero=2, data=1, zero_stage=3))
            for one in PLANS["zero-bubble"].stages[1].runs]  # fmt: skip
    stages = (PLANS["zero-bubble"].stages[0], Stage(tuple(held)))
    left_out = export(replace(PLANS["zero-bubble"], stages=stages), "megatron").left_out
    assert any("layers.4 … layers.7: zero3x2, instead of data2" in line for line in left_out)
    with pytest.raises(InputError, match=r"plan, stages.1, strategy of layers.4: 'zero3x2' .*needs zero 1"):
        check_runs(replace(PLANS["zero-bubble"], stages=stages))
    out = Strategy(data=2, offload=Offload.ACTIVATIONS, recompute=Recompute.SELECTIVE)
    with pytest.raises(InputError, match=r"plan, stages.1, strategy of layers.4: .*cannot train with it"):
        check_runs(replace(PLANS["zero-bubble"], stages=(stages[0], Stage((replace(held[0], strategy=out),)))))
    branch = BranchPlacement("left", ("left",), 0, 4, (runs[0],))
    with pytest.raises(InputError, match=r"plan, branches: 'given' .*one after the other alone"):
        check_runs(replace(first, branches=(branch,)), DEEPSPEED)
    alone = plan(Strategy(data=4, offload=Offload.STATES))
    assert json.loads(export(alone, "deepspeed").text)["zero_optimization"]["stage"] == 1
    edges = export(plan(Strategy(zero=4, zero_stage=3, recompute=Recompute.FULL)), "accelerate").left_out
    assert not any("instead of" in line for line in edges), "what recomputes is said of blocks alone"
    assert commented(["a\x1b[2Jb\nc"]) == "# a\\x1b[2Jb\\nc\n"


def test_selective_recompute_beside_full_is_reported() -> None:
    first = plan(Strategy(zero=4, zero_stage=3, recompute=Recompute.SELECTIVE), (BLOCKS,))
    before, blocks, after = first.stages[0].runs
    half = replace(blocks, last="layers.3", count=4)
    rest = replace(blocks, first="layers.4", count=4, strategy=replace(blocks.strategy, recompute=Recompute.FULL))
    both = replace(first, stages=(replace(first.stages[0], runs=(before, half, rest, after)),))
    assert any("beside full" in line for line in export(both, "megatron").left_out)


def test_the_command_writes_prints_and_is_strict(tmp_path: Path) -> None:
    given, file = tmp_path / "plan.yaml", tmp_path / "there" / "ds.json"
    write_plan(PLANS["zero3"], given)
    runner = CliRunner()
    written = runner.invoke(app, ["export", str(given), "--to", "deepspeed", "-o", str(file)])
    assert written.exit_code == 0, written.output
    assert json.loads(file.read_text())["zero_optimization"] == {"stage": 3}
    assert "left to you, recompute in every block" in written.stderr
    printed = runner.invoke(app, ["export", str(given), "--to", "torchtitan", "--json"])
    answer = json.loads(printed.stdout)
    assert (answer["tool"], answer["file"], answer["left_out"]) == ("torchtitan", None, [])
    write_plan(PLANS["hybrid"], given)
    strict = runner.invoke(app, ["export", str(given), "--for", "deepspeed", "--strict"])
    assert isinstance(strict.exception, InputError)
    unknown = runner.invoke(app, ["export", str(given), "--to", "horovod"])
    assert isinstance(unknown.exception, InputError)
    assert "megatron, nemo, torchtitan, deepspeed, accelerate" in str(unknown.exception)
