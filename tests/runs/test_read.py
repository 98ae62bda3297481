"""A run's folder is read back as it was written; what is damaged is named, whatever it holds."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.errors import FileFormatError
from galvatron_lite.runs.schema import EndRecord, PlanRecord, RankRecord, StepPart, StepRecord, is_run, read_run
from tests.runs.lines import a_header, a_plan, a_rank_header, text_of, write


def _steps(numbers: range, seconds: float = 0.1) -> list[StepRecord]:
    return [StepRecord(number, 1000.0 + number, seconds, samples=8, tokens=128, loss=1.0) for number in numbers]


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    ranks = [RankRecord(rank, 3, 4, 0.1, parts={StepPart.FORWARD: 0.04}, layers={"0": 0.01}) for rank in range(2)]
    write(tmp_path, "steps-00001.jsonl", [a_header(), *_steps(range(4)), EndRecord(4, 1005.0)])
    for rank, record in enumerate(ranks):
        write(tmp_path, f"rank-0000{rank}-00001.jsonl", [a_rank_header(rank), record])
    run = read_run(tmp_path)
    assert run.header == a_header()
    assert run.plan == a_plan()
    assert run.since == 0
    assert list(run.steps) == _steps(range(4))
    assert run.ranks == ((ranks[0],), (ranks[1],))
    assert run.ends == (EndRecord(4, 1005.0),)
    assert not run.torn
    assert is_run(tmp_path)


def test_a_resumed_run_replaces_the_steps_that_it_trains_again(tmp_path: Path) -> None:
    write(tmp_path, "steps-00001.jsonl", [a_header(), *_steps(range(6))])
    write(tmp_path, "steps-00002.jsonl", [a_header(2000.0, 4), *_steps(range(4, 8), 0.2)])
    run = read_run(tmp_path)
    assert [one.step for one in run.starts] == [0, 4]
    assert [(one.step, one.seconds) for one in run.steps[3:6]] == [(3, 0.1), (4, 0.2), (5, 0.2)]
    assert len(run.steps) == 8
    assert run.since == 4


def test_a_change_of_plan_counts_and_so_do_later_files_that_repeat_it(tmp_path: Path) -> None:
    changed = PlanRecord(2, a_plan(0.05), "def")
    write(tmp_path, "steps-00001.jsonl", [a_header(), *_steps(range(2)), changed, *_steps(range(2, 4))])
    write(tmp_path, "steps-00002.jsonl", [a_header(), changed, *_steps(range(4, 6))])
    old, new = RankRecord(0, 1, 2, 0.1), RankRecord(0, 5, 4, 0.05)
    write(tmp_path, "rank-00000-00001.jsonl", [a_rank_header(0), old, a_rank_header(0, digest="def"), new])
    run = read_run(tmp_path)
    assert len(run.starts) == 1
    assert run.plans == (changed,)
    assert run.plan == a_plan(0.05)
    assert [one.step for one in run.plan_steps] == [2, 3, 4, 5]
    assert run.ranks == ((new,),)


def test_a_last_line_that_was_cut_off_is_skipped_and_reported(tmp_path: Path) -> None:
    write(tmp_path, "steps-00001.jsonl", [a_header(), *_steps(range(3))], more='{"kind": "step", "st')
    run = read_run(tmp_path)
    assert len(run.steps) == 3
    assert run.torn == ("steps-00001.jsonl",)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "line 2"),
        ("[1, 2]", "kind"),
        ('{"kind": "other"}', "kind"),
        ('{"kind": ["step"]}', "kind"),
        ('{"kind": "step", "step": 0, "time": 1, "seconds": -1}', "seconds"),
        ('{"kind": "step", "step": 0, "time": 1, "seconds": NaN}', "seconds"),
        ('{"kind": "step", "step": 0, "time": 1, "seconds": 1, "colour": "red"}', "colour"),
        ('{"kind": "begin", "version": 9, "rank": 0, "digest": "", "time": 1}', "version"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str, said: str) -> None:
    write(tmp_path, "steps-00001.jsonl", [a_header()], more=line + "\n")
    with pytest.raises(FileFormatError, match=said):
        read_run(tmp_path)


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="holds no run"):
        read_run(tmp_path)
    with pytest.raises(FileFormatError, match="no such folder"):
        read_run(tmp_path / "none")
    write(tmp_path, "steps-00001.jsonl", _steps(range(2)))
    with pytest.raises(FileFormatError, match="header"):
        read_run(tmp_path)


_WHOLE = text_of([a_header(), *_steps(range(2)), PlanRecord(1, a_plan(), "def"), EndRecord(2, 1.0)]).encode()


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, len(_WHOLE) - 1), junk=st.binary(max_size=12), cut=st.booleans())
def test_damaged_files_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, place: int, junk: bytes, cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("run")
    rest = b"" if cut else _WHOLE[place + len(junk) :]
    (folder / "steps-00001.jsonl").write_bytes(_WHOLE[:place] + junk + rest)
    with contextlib.suppress(FileFormatError):
        read_run(folder)
