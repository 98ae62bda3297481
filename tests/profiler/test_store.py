"""Profiles on disk: what was written is read, and what is broken is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import to_data, write_data
from galvatron_lite.model.shapes import load_model
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import (
    last_profile,
    other_hardware,
    profile_hash,
    profile_path,
    read_profile,
    save_profile,
    write_profile,
)
from galvatron_lite.profiler.timing import Journal, MeasureTask, run_tasks


@pytest.fixture(scope="module")
def profile() -> Profile:
    graph, cluster = load_model("gpt2"), load_cluster("a100-80gb", 8)
    return estimate_profile(graph, cluster, precision=graph.precision, name="gpt2")


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_read_what_was_written(profile: Profile, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"x.{ending}"
    write_profile(profile, path)
    assert read_profile(path) == profile
    assert profile_hash(read_profile(path)) == profile_hash(profile)
    assert path.stat().st_size < 300_000


def test_the_hash_changes_with_anything(profile: Profile) -> None:
    slower = replace(profile.layers[0], forward=profile.layers[0].forward * 2)
    assert profile_hash(replace(profile, layers=(slower, *profile.layers[1:]))) != profile_hash(profile)


def test_the_last_profile_is_found(profile: Profile, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="galvatron profile"):
        last_profile(tmp_path)
    first = save_profile(profile, tmp_path, "My CPU / host")
    assert first == profile_path(tmp_path, "My CPU / host", "gpt2") == tmp_path / "My-CPU-host" / "gpt2.yaml"
    save_profile(replace(profile, name="unasked"), tmp_path, "m", remember=False)
    assert last_profile(tmp_path) == first
    second = save_profile(replace(profile, name="other"), tmp_path, "m")
    assert last_profile(tmp_path) == second
    assert last_profile(tmp_path) != first
    second.unlink()
    with pytest.raises(FileFormatError, match="gone"):
        last_profile(tmp_path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_files_are_refused(profile: Profile, tmp_path: Path, share: float) -> None:
    path = tmp_path / "x.yaml"
    write_profile(profile, path)
    text = path.read_text()
    path.write_text(text[: int(len(text) * share)])
    with pytest.raises(FileFormatError):
        read_profile(path)


def test_corrupt_files_are_refused(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match="read"):
        read_profile(path)
    for text in ("", "[1, 2]", "version: 1", "just words"):
        path.write_text(text)
        with pytest.raises(FileFormatError):
            read_profile(path)
    with pytest.raises(FileFormatError, match="no such file"):
        read_profile(tmp_path / "missing.yaml")


def test_another_version(profile: Profile, tmp_path: Path) -> None:
    write_data(tmp_path / "x.yaml", {**to_data(profile), "version": 99})
    with pytest.raises(FileFormatError, match="version 1"):
        read_profile(tmp_path / "x.yaml")


def test_unknown_keys_and_missing_layers(profile: Profile, tmp_path: Path) -> None:
    write_data(tmp_path / "x.yaml", {**to_data(profile), "colour": "red"})
    with pytest.raises(FileFormatError, match="colour"):
        read_profile(tmp_path / "x.yaml")
    only_blocks = tuple(point for point in profile.layers if point.kind not in {"before", "after"})
    write_profile(replace(profile, layers=only_blocks), tmp_path / "x.yaml")
    with pytest.raises(FileFormatError, match="before"):
        read_profile(tmp_path / "x.yaml")


def test_other_hardware_warns(profile: Profile) -> None:
    here = replace(profile.cluster, fingerprint={"cpu": "A", "torch": "2.13"})
    there = replace(profile.cluster, fingerprint={"cpu": "B", "torch": "2.13"})
    assert other_hardware(replace(profile, cluster=here), here) == []
    warnings = other_hardware(replace(profile, cluster=here), there)
    assert len(warnings) == 1
    assert "CPU model" in warnings[0]
    assert "B" in warnings[0]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("graph", "ties", 0, "second"), "nowhere"), (("graph", "precision"), "fp7"), (("gather_precision",), "x"),
        (("layers", 0, "forward"), float("inf")), (("layers", 0, "samples"), 0), (("layers", 0, "tensor"), 0),
        (("graph", "kinds", "block", "parameters", "tensor"), -1), (("graph", "layers", 1, "name"), "before"),
        (("graph", "kinds", "block", "operators", 0, "flops"), 2**63), (("graph", "name"), "a\nb"),
        (("graph", "layers"), [{"name": f"l{n}", "kind": "block", "role": "block"} for n in range(10_000)]),
        (("cluster", "levels", 0, "bandwidth"), 0), (("cluster", "groups", 0, "device", "peak", "bf16"), 0),
        (("hidden",), {"data": 2}), (("optimizer", "seconds_per_item"), -1),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_figures_no_computer_has_are_refused_when_read(
    profile: Profile, tmp_path: Path, place: tuple[str | int, ...], value: object
) -> None:
    data = part = json.loads(json.dumps(to_data(profile)))
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    write_data(tmp_path / "x.json", data)
    with pytest.raises(FileFormatError, match=r"x\.json"):
        read_profile(tmp_path / "x.json")


def make_tasks(calls: list[str], fail_at: int | None = None) -> list[MeasureTask]:
    def task(index: int) -> MeasureTask:
        def run(_: object) -> int:
            if index == fail_at:
                raise KeyboardInterrupt
            calls.append(f"task {index}")
            return index * index

        return MeasureTask(f"task {index}", f"task {index}", run)

    return [task(index) for index in range(5)]


def test_a_task_without_results_is_not_run_again(tmp_path: Path) -> None:
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


def test_a_corrupt_line_of_a_journal_is_skipped(tmp_path: Path) -> None:
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


def test_progress_counts_every_task(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    run_tasks(make_tasks([]), Journal(tmp_path / "j", "id"), lambda done, total, _: seen.append((done, total)))
    assert seen == [(done, 5) for done in range(6)]
