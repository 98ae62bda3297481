import json
from pathlib import Path

import pytest

from galvatron_lite.errors import FileFormatError
from galvatron_lite.validate.rows import KINDS, REAL, WHOLE, parse_runs, read_runs, run_from_data

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


@pytest.mark.parametrize("line", ["{", "[1]", '{"family": "f"}', "[" * 100_000])
def test_a_line_that_is_no_run_is_counted_with_its_number_and_costs_no_other(line: str) -> None:
    runs = list(parse_runs([json.dumps(LEAST), line, json.dumps(LEAST)]))
    assert [run.line for run in runs] == [1, 2, 3]
    assert runs[0].problem is None is runs[2].problem
    assert runs[1].problem is not None
    assert "line 2" in runs[1].problem


def test_a_run_with_a_problem_keeps_its_other_fields() -> None:
    (run,) = parse_runs([json.dumps(LEAST | {"layers": "32", "gpu": "A100", "quality": "A"})])
    assert (run.family, run.run_id, run.gpu, run.quality, run.layers) == ("f", "r", "A100", "A", None)


@pytest.mark.parametrize("field", sorted(WHOLE))
def test_whole_numbers_have_a_least_and_a_largest_value(field: str) -> None:
    least, largest = WHOLE[field]
    assert getattr(run_from_data(LEAST | {field: least}), field) == least
    assert getattr(run_from_data(LEAST | {field: largest}), field) == largest
    for value in (least - 1, largest + 1, 10**400, float("inf"), float("nan"), -1):
        with pytest.raises(FileFormatError, match=f"{field}.*{largest:,}"):
            run_from_data(LEAST | {field: value})


@pytest.mark.parametrize("field", sorted(REAL))
def test_numbers_are_positive_and_finite(field: str) -> None:
    assert getattr(run_from_data(LEAST | {field: 0.5}), field) == 0.5
    for value in (0, -1.2, float("inf"), float("nan"), 1e12, 10**400, True, "1"):
        with pytest.raises(FileFormatError, match=field):
            run_from_data(LEAST | {field: value})


def test_every_number_has_a_range() -> None:
    assert {name for name, kind in KINDS.items() if kind == "int"} == set(WHOLE)
    assert {name for name, kind in KINDS.items() if kind == "float"} == set(REAL)


def test_grades_are_known_ones() -> None:
    assert run_from_data(LEAST | {"quality": "A-mem"}).quality == "A-mem"
    with pytest.raises(FileFormatError, match="A, B, A-mem, C"):
        run_from_data(LEAST | {"quality": "Z"})


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="no such file"):
        read_runs(tmp_path / "none.jsonl")


def test_the_published_rows_all_read() -> None:
    runs = read_runs(Path(__file__).parents[2] / "profiles" / "published" / "runs.jsonl")
    assert len(runs) == 4229
    assert len({run.family for run in runs}) == 37
    assert not [run.problem for run in runs if run.problem]
