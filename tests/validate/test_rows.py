import json
from pathlib import Path

import pytest

from galvatron_lite.errors import FileFormatError
from galvatron_lite.validate.rows import parse_runs, read_runs, run_from_data

LEAST = {"family": "f", "run_id": "r", "framework": "x"}


def test_absent_fields_are_none_and_unknown_ones_are_passed_over() -> None:
    run = run_from_data(LEAST | {"layers": 4, "something_new": [1]})
    assert (run.layers, run.hidden, run.oom) == (4, None, None)


def test_whole_numbers_may_be_written_as_floats() -> None:
    assert run_from_data(LEAST | {"layers": 4.0}).layers == 4


@pytest.mark.parametrize(
    ("field", "value"), [("layers", "four"), ("layers", 4.5), ("tp", 0), ("gated_mlp", 1), ("gpu", 3), ("mfu2", None)]
)
def test_a_field_of_the_wrong_kind_is_named_with_its_line(field: str, value: object) -> None:
    lines = ["", json.dumps(LEAST | {field: value})]
    (run,) = parse_runs(lines, "runs.jsonl")
    if field == "mfu2":
        assert run.problem is None
    else:
        assert run.problem is not None
        assert f"runs.jsonl, line 2, {field}" in run.problem
        with pytest.raises(FileFormatError, match=field):
            run_from_data(LEAST | {field: value})


@pytest.mark.parametrize("line", ["{", "[1]", '{"family": "f"}'])
def test_a_line_that_is_no_run_is_an_error_that_names_it(line: str) -> None:
    with pytest.raises(FileFormatError, match="line 1"):
        list(parse_runs([line]))


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="no such file"):
        read_runs(tmp_path / "none.jsonl")


def test_the_published_rows_all_read() -> None:
    runs = read_runs(Path(__file__).parents[2] / "profiles" / "published" / "runs.jsonl")
    assert len(runs) == 4229
    assert len({run.family for run in runs}) == 37
    assert not [run.problem for run in runs if run.problem]
