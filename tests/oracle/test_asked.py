"""What the command is asked and how it answers: numbers of devices, options that go together, output."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from galvatron_lite.cli import app
from galvatron_lite.errors import InputError
from galvatron_lite.oracle.request import OracleOptions, counts_of, forecast, methods_named, network_names
from galvatron_lite.oracle.rows import Method


def asked(line: str) -> Any:
    done = CliRunner().invoke(app, ["oracle", *shlex.split(line)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def row(data: Any, strategy: str, gpus: int) -> Any:
    line = next(one for one in data["strategies"] if one["strategy"] == strategy)
    return next(one for one in line["rows"] if one["gpus"] == gpus)


def test_numbers_of_devices() -> None:
    known = {
        "64": (64,), "4, 8,12": (4, 8, 12), "1..1024": tuple(2**power for power in range(11)), "3..8": (3, 6, 8),
        "8,1..4,8": (1, 2, 4, 8),
    }  # fmt: skip
    assert {text: counts_of(text) for text in known} == known
    for text in ("", "0", "4..2", "8,", "-4", "1.5"):
        with pytest.raises(InputError, match="--gpus"):
            counts_of(text)


def test_strategies_by_name() -> None:
    assert methods_named(["filter", "data", "filter"]) == (Method.FILTER, Method.DATA)
    assert len(methods_named([])) == 7
    with pytest.raises(InputError, match=r"--strategies: 'tensor'.*data\+filter"):
        methods_named(["tensor"])


def test_the_paper_s_figure() -> None:
    out = asked("resnet50 --formulas paradl --cluster abci --gpus 1024 --json")
    assert "1.5584128296" in out  # to the digit, as it is printed
    data = json.loads(out)
    assert row(data, "data", 1024)["communication"] == 1.5584128296
    assert row(data, "data", 1024)["compute"] == 3.8993775
    assert row(data, "data", 1024)["memory"] == 15_434_845_696
    assert row(data, "filter", 1024)["problem"] == "beyond its limit of 64 GPUs"
    assert data["origin"].startswith("measured")


def test_settings_and_quirks_reach_the_formulas() -> None:
    plain = "resnet50 --formulas paradl --cluster abci --gpus 1024 --strategies data+filter --json"
    free = row(json.loads(asked(plain)), "data+filter", 1024)["communication"]
    code = f"{plain} --network plx-20us --quirk data-filter-reduces-whole-weights"
    assert row(json.loads(asked(code)), "data+filter", 1024)["communication"] == 19.4024909069
    assert free < 19.4
    assert row(json.loads(asked(f"{plain} --no-contention")), "data+filter", 1024)["communication"] < free


def test_the_planner_s_table() -> None:
    data = json.loads(asked("resnet50 --cluster abci --gpus 1,4 --precision fp32 --batch 16 --samples 3200 --json"))
    alone, four = (row(data, "data", gpus) for gpus in (1, 4))
    assert (alone["iterations"], four["iterations"], four["batch"]) == (200, 50, 64)
    assert four["epoch"] == pytest.approx(alone["epoch"] / 4, rel=0.1)
    assert row(data, "spatial", 4)["memory"] < alone["memory"]
    parts = ("compute", "communication", "weight_update", "waiting", "other")
    assert four["epoch"] == pytest.approx(sum(four[part] for part in parts))
    assert {one["strategy"] for one in data["strategies"]} >= {"data", "pipeline", "data+spatial"}
    assert data["origin"].startswith("estimated")


def test_the_table_for_people(tmp_path: Path) -> None:
    figure = tmp_path / "oracle.svg"
    out = asked(f"vgg16 --cluster abci --gpus 1,8,64 --strategies data,filter --precision fp32 --plot {figure}")
    assert "does not fit" not in out
    assert "L filter: layer-wise collectives:" in out
    assert "data scales to 40,000 GPUs" in out
    assert figure.read_text().startswith("<svg")


def test_every_shipped_table_answers() -> None:
    assert {"resnet50", "resnet152", "vgg16", "alexnet", "cosmoflow-256", "cosmoflow-512"} <= set(network_names())
    for name in network_names():
        found = forecast(name, "abci", OracleOptions((1, 4, 64), "paradl"))
        assert all(line.complete for line in found.lines)


def test_any_model_and_any_cluster() -> None:
    found = forecast("regnety_032", "v100", OracleOptions((1, 8, 16), "paradl", batch=16))
    data = found.lines[0]
    assert found.origin.startswith("estimated")
    assert data.rows[2].epoch < data.rows[1].epoch < data.rows[0].epoch


def test_strategies_that_a_model_does_not_allow_are_left_out() -> None:
    found = forecast("gpt2", "v100", OracleOptions((1, 8), batch=8))
    assert [line.strategy for line in found.lines] == ["data", "pipeline"]
    assert "no layer of gpt2 can be split so: spatial, filter" in found.notes[1]


def test_edges_of_a_model_do_without_what_blocks_do() -> None:
    found = forecast("gpt2", "v100", OracleOptions((8,), batch=8, texts=("zero3x4 tensor2+sp recompute", "data8")))
    lean, plain = (line.rows[0] for line in found.lines)
    assert lean.problem == plain.problem == ""
    assert lean.memory < plain.memory
    assert lean.compute > plain.compute  # the same samples a replica of two, and forward again


def test_pictures_of_another_size() -> None:
    options = (OracleOptions((4,), batch=4, image=image) for image in (None, "448x896"))
    small, large = (forecast("convnext-xl", "v100", each).lines[0].rows[0].compute for each in options)
    assert large > 6 * small
    closed = forecast("vgg16", "abci", OracleOptions((4,), "paradl", image="448"))  # not the published table, of 226
    assert closed.origin.startswith("estimated")


def test_a_table_of_one_s_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    layer = "{name: conv, op: conv, x: [3, 8, 8], kernel: [3, 3], y: [4, 8, 8], split: [filter, spatial]}"
    path.write_text(
        "name: mine\nsource: me\nsamples: 100\nbatch: 4\nseconds: 0.001\nseconds_origin: measured\n"
        f"seconds_source: me\nlayers: [{layer}]\n"
    )
    found = forecast(str(path), "abci", OracleOptions((1, 2), "paradl"))
    assert (found.model, found.samples, found.lines[0].rows[0].compute) == ("mine", 100, pytest.approx(0.1))
    path.write_text(path.read_text().replace("op: conv", "op: convolve"))
    with pytest.raises(InputError, match=r"layers\.0\.op"):
        forecast(str(path), "abci", OracleOptions((1,), "paradl"))


def test_the_check_prints_rows_means_and_orders() -> None:
    out = asked("--check")
    assert "report: resnet50 data+spatial, 32 GPUs, 256 a replica" in out
    assert "galvatron: strategies in the right order in" in out
    assert "data+filter: Whole weights are summed between nodes" in out
    data = json.loads(asked("--check --json"))
    assert len(data["rows"]) == 68
    assert data["rows"][0]["predicted"]["published"] == 335
    assert set(data["mean"]) == {"paradl", "galvatron", "published"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "model is missing"),
        ("resnet50", "--cluster is missing"),
        ("resnet5O --cluster abci", "model: 'resnet5O' .*resnet50"),
        ("resnet50 --cluster abci --formulas hockney", "--formulas: 'hockney' .*galvatron or paradl"),
        ("resnet50 --cluster abci --formulas paradl --gpus 8192", "--gpus: 8192 .*4096"),
        ("resnet50 --cluster abci --quirk all", "--quirk: 'all' .*--formulas paradl"),
        ("resnet50 --cluster abci --formulas paradl --strategy data8", "--strategy: 'data8' .*galvatron"),
        ("resnet50 --cluster abci --formulas paradl --quirk typo", "--quirk: 'typo' .*filter-memory"),
        ("resnet50 --cluster abci --strategy data8x", "--strategy: 'data8x'"),
        ("resnet50 --cluster abci --gpus 8 --strategy tensor8", "No layer can be split so.*filters up to"),
        ("gpt2 --cluster v100 --strategies data,filter", "--strategies: 'filter' .*allows data, pipeline"),
        ("resnet50 --cluster abci --batch 0", "--batch: 0"),
        ("resnet50 --cluster abci --group -1", "--group: -1"),
        ("resnet50 --cluster abci --precision fp64", "--precision"),
        ("resnet50 --cluster abci --image 12y", "--image: '12y'"),
        ("vgg16 --cluster abci --image 224x448", "--image: '224x448' .*square"),
        ("resnet50 --cluster abci --plot x.png", "--plot: 'x.png'"),
        ("gpt2 --cluster abci --formulas paradl", "closed forms are of convolutional networks"),
        ("unet --cluster abci --gpus 8 --strategy spatial8x8", "takes 64 devices or a multiple: give --gpus 64"),
    ],
)
def test_bad_input(line: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        asked(line)


def test_groups_follow_one_rule() -> None:
    """U-Net's last convolution has two filters."""
    data = json.loads(asked("unet --cluster abci --gpus 2,4 --strategies filter,data+filter --json"))
    for name in ("filter", "data+filter"):
        assert not row(data, name, 2).get("problem")
        assert "beyond" in row(data, name, 4)["problem"]


def test_groups_that_devices_do_not_fill_have_no_figures() -> None:
    data = json.loads(asked("resnet50 --cluster abci --gpus 3,8 --strategies data+filter --group 3 --json"))
    assert "whole groups of 3" in row(data, "data+filter", 8)["problem"]
    assert "split among 3" in row(data, "data+filter", 3)["problem"]
