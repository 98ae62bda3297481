"""The command on a few published rows."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

import pytest

from galvatron_lite.cli import main
from galvatron_lite.cli.accuracy import _filtered
from galvatron_lite.errors import InputError
from galvatron_lite.validate.rows import read_runs

RUNS = Path(__file__).parents[2] / "profiles" / "published" / "runs.jsonl"


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "few.jsonl"
    path.write_text("\n".join(RUNS.read_text().splitlines()[::60]) + "\n")
    return path


def command(*arguments: str, lines: tuple[str, ...] = ()) -> CompletedProcess[str]:
    """How the command ends in this process, and what it prints; ``lines`` of standard input."""
    words, out, said = ["galvatron", "validate", *arguments], io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", words), patch.object(sys, "stdin", io.StringIO("\n".join(lines))),
        redirect_stdout(out), redirect_stderr(said), pytest.raises(SystemExit) as ended,
    ):  # fmt: skip
        main()
    return CompletedProcess(words, int(ended.value.code or 0), out.getvalue(), said.getvalue())


def test_json_and_plot(few: Path, tmp_path: Path) -> None:
    done = command(str(few), "--json", "--plot", str(tmp_path / "out.svg"))
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    rows = sum(family["rows"] for family in data["families"].values())
    assert rows == len(few.read_text().splitlines())
    assert all(f["rows"] == f["scored"] + sum(f["skipped"].values()) + f["oom"] for f in data["families"].values())
    assert data["macro"]["time_mape"] > 0
    assert (tmp_path / "out.svg").read_text().startswith("<svg")


def test_table_and_worst(few: Path) -> None:
    done = command(str(few), "--worst", "2", "--family", "vtrain-single", "--family", "dgxc")
    assert done.returncode == 0, done.stderr
    assert "macro language" in done.stdout
    assert done.stdout.count(" s, measured ") == 2
    assert "llmfoundry" not in done.stdout


def test_wrong_options_are_named() -> None:
    runs = read_runs(RUNS)
    with pytest.raises(InputError, match="--family"):
        _filtered(runs, ["nobody"], None)
    with pytest.raises(InputError, match="--quality"):
        _filtered(runs, [], "D")
    assert {run.quality for run in _filtered(runs, [], "A")} == {"A", "A-mem"}


def test_a_file_that_is_not_there() -> None:
    done = command("nowhere.jsonl")
    assert done.returncode == 1
    assert "There is no such file" in done.stderr


OWN = {
    "family": "mine", "run_id": "mine-1", "framework": "torchtitan (torch.compile)", "model": "llama-8b",
    "arch": "decoder", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336,
    "gated_mlp": True, "vocab": 128256, "tied_embeddings": False, "seq_len": 8192, "gpu": "H100-SXM5-80GB",
    "gpus_per_node": 8, "n_gpus": 64, "inter_net": "InfiniBand NDR", "inter_node_gbps": 3200, "dp": 64,
    "zero_stage": 3, "micro_batch": 1, "global_batch": 64, "act_ckpt": "selective", "precision": "bf16",
    "iter_time_s": 1.2, "peak_mem_gb": 45.0, "quality": "A",
}  # fmt: skip
"""The row of docs/validate.md."""


def own(**changes: object) -> str:
    return json.dumps({name: value for name, value in (OWN | changes).items() if value is not None})


def scored(*lines: str, options: tuple[str, ...] = ()) -> CompletedProcess[str]:
    return command("-", *options, lines=lines)


def test_invalid_rows_are_named_and_others_scored() -> None:
    lines = [
        own(), "{broken", own(run_id="deep", layers=10**9), own(run_id="long", seq_len=10**12),
        own(run_id="gone", inter_node_gbps=-1), own(run_id="huge", iter_time_s=float("inf")),
        own(run_id="mine-1", framework="lightning"), own(run_id="ms", iter_time_s=1200),
        own(run_id="odd", iter_tiem_s=1),
    ]  # fmt: skip
    done = scored(*lines, options=("--json", "--worst", "1"))
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout, parse_constant=lambda word: pytest.fail(word))
    assert [(row["run_id"], row["line"]) for row in data["unscored"]] == [
        ("line 2", 2), ("deep", 3), ("long", 4), ("gone", 5), ("huge", 6),
    ]  # fmt: skip
    for row, field in zip(data["unscored"][1:], ("layers", "seq_len", "inter_node_gbps", "iter_time_s"), strict=True):
        assert row["reason"] == "a field cannot be read"
        assert f"{field}: " in row["detail"]
    notes = " | ".join(data["notes"])
    for said in ("no JSON object", "more than once", "iter_tiem_s (meant iter_time_s?)", "check the units"):
        assert said in notes
    assert any(text.startswith("framework 'lightning' is not known") for text in data["assumed"])
    assert (data["worst"][0]["run_id"], data["worst"][0]["line"], data["worst"][0]["family"]) == ("ms", 8, "mine")


def test_the_readable_output_names_rows_that_are_not_scored() -> None:
    done = scored(own(), own(run_id="a", gpu="X900"), own(run_id="b", layers="32"), options=("--skipped", "1"))
    assert done.returncode == 0, done.stderr
    assert "line 2, a: no data sheet of the GPU" in done.stdout
    assert "1 more not scored" in done.stdout
    assert "macro" not in done.stdout


@pytest.mark.parametrize("lines", [(), ("", "  "), ("{",), ('{"family": "f"}',)])
def test_nothing_scored_is_an_error(lines: tuple[str, ...], tmp_path: Path) -> None:
    done = scored(*lines, options=("--plot", str(tmp_path / "out.svg")))
    assert done.returncode == 1
    assert done.stderr.startswith("galvatron: runs: '-' cannot be used")
    assert not list(tmp_path.iterdir())


def test_a_figure_goes_into_a_folder_that_is_there_and_is_svg(tmp_path: Path) -> None:
    for name, said in ((tmp_path / "none" / "x.svg", "no folder"), (tmp_path / "x.png", "ends in .svg")):
        done = scored(own(), options=("--plot", str(name)))
        assert done.returncode == 1
        assert said in done.stderr
    done = scored(own(iter_time_s=None), options=("--plot", str(tmp_path / "x.svg")))
    assert done.returncode == 1
    assert "nothing to draw" in done.stderr
    assert not list(tmp_path.iterdir())
