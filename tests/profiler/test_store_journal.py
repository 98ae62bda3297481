"""What survives a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from galvatron_lite.profiler.timing import Journal, MeasureTask, run_tasks


def make_tasks(calls: list[str], fail_at: int | None = None) -> list[MeasureTask]:
    def task(index: int) -> MeasureTask:
        def run(_: object) -> int:
            if index == fail_at:
                raise KeyboardInterrupt
            calls.append(f"task {index}")
            return index * index

        return MeasureTask(f"task {index}", f"task {index}", run)

    return [task(index) for index in range(5)]


def test_rerun_measures_only_the_rest(tmp_path: Path) -> None:
    path, first, second = tmp_path / "x.journal.jsonl", list[str](), list[str]()
    with pytest.raises(KeyboardInterrupt):
        run_tasks(make_tasks(first, fail_at=3), Journal(path, "id"))
    results = run_tasks(make_tasks(second), Journal(path, "id"))
    assert first == ["task 0", "task 1", "task 2"]
    assert second == ["task 3", "task 4"]
    assert results == {f"task {index}": index * index for index in range(5)}


def test_a_result_of_nothing_is_finished_too(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "id")
    journal.add("empty", None)
    assert Journal(tmp_path / "j", "id").finished == {"empty": None}


@pytest.mark.parametrize("cut", range(1, 20, 3))
def test_torn_last_line_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "j"
    journal = Journal(path, "id")
    journal.add("one", {"seconds": 1.5})
    journal.add("two", {"seconds": 2.5})
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(path, "id")
    assert again.finished == {"one": {"seconds": 1.5}}
    again.add("three", 3)
    assert Journal(path, "id").finished == {"one": {"seconds": 1.5}, "three": 3}


def test_garbage_in_the_middle_costs_only_that_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    Journal(path, "id").add("one", 1)
    with path.open("ab") as stream:
        stream.write(b'{"key": \xff\n[1]\n')
    Journal(path, "id").add("two", 2)
    assert Journal(path, "id").finished == {"one": 1, "two": 2}


def test_another_measurement_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "j"
    Journal(path, "id").add("one", 1)
    assert Journal(path, "other").finished == {}
    assert Journal(path, "other").finished == {}
    assert Journal(path, "id").finished == {}


def test_without_resume_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "j"
    Journal(path, "id").add("one", 1)
    assert Journal(path, "id", resume=False).finished == {}
    path.write_bytes(b"\x00not json")
    assert Journal(path, "id").finished == {}


def test_removed_at_the_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deep" / "j", "id")
    assert journal.path.exists()
    journal.remove()
    assert not journal.path.exists()


def test_progress_counts_every_task(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    run_tasks(make_tasks([]), Journal(tmp_path / "j", "id"), lambda done, total, _: seen.append((done, total)))
    assert seen == [(done, 5) for done in range(6)]
