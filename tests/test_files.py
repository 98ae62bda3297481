from __future__ import annotations

import os
from pathlib import Path
from time import process_time

import pytest

from galvatron_lite.cluster.cluster import Device
from galvatron_lite.diagnose.traces import read_trace
from galvatron_lite.errors import FileFormatError
from galvatron_lite.files import from_data, read_data, read_value, to_data, write_data, write_text, write_value
from galvatron_lite.runtime.checkpoint.shards import TensorFile
from galvatron_lite.runtime.monitor.decide import read_log
from galvatron_lite.validate.rows import read_lines

DEVICE = Device("toy", 2**30, 1e9, {"fp32": 1e12}, units=4, source="https://example.org")


@pytest.mark.parametrize("name", ["device.yaml", "device.json"])
def test_a_value_reads_back_as_written(tmp_path: Path, name: str) -> None:
    write_value(tmp_path / name, DEVICE)
    assert read_value(Device, tmp_path / name) == DEVICE


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(FileFormatError, match="memorry"):
        from_data(Device, to_data(DEVICE) | {"memorry": 1}, "device.yaml")


def test_a_wrong_value_is_named() -> None:
    with pytest.raises(FileFormatError, match=r"device.yaml, memory: 'lots'"):
        from_data(Device, to_data(DEVICE) | {"memory": "lots"}, "device.yaml")


@pytest.mark.parametrize("text", ["{", "name: [", "\x00\x01", "a: &a [*a", "- 1\n- 2"])
def test_corrupt_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "device.yaml"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=r"device\.yaml"):
        read_value(Device, path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "version: 1\n a: [1,\nb: }", r"a\.yaml, line 2: 'a: \[1,'.* no YAML there"),
        ("a.yaml", "a: 1\n\tb: 2", r"a\.yaml, line 2: 'b: 2'.*begins in line 1"),
        ("a.json", '{"a": 1,\n,}', r"a\.json, line 2: ',}'.* no JSON there"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(FileFormatError, match=said) as raised:
        read_data(tmp_path / name)
    assert "unicode string" not in str(raised.value)


def test_every_truncation_is_refused_or_complete(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    write_value(path, DEVICE)
    whole = path.read_text()
    for length in range(len(whole.rstrip()) - 1):
        path.write_text(whole[:length])
        with pytest.raises(FileFormatError):
            read_value(Device, path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="no such file"):
        read_value(Device, tmp_path / "none.yaml")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "old")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


_BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", _BOMB), ("a.yaml", "a: &a\n  b: *a"), ("a.yaml", "[" * 50_000), ("a.yaml", "- " * 50_000 + "x"),
        ("a.yaml", "a: {<<: &a {x: 1}, y: *a, z: [" + "*a," * 20_000 + "]}"), ("a.json", "[" * 50_000),
        ("a.json", "[" * 200 + "]" * 200), ("a.json", "[" + "1," * 10**6 + "1]"), ("a.json", "[" + " " * 10**8 + "]"),
        ("a.yaml", "a: " + "1" * 10**7), ("a.json", "1" + "0" * 400), ("a.yaml", "a: 0x" + "f" * 100),
        ("a.json", "1e400"), ("a.json", "NaN"), ("a.yaml", "a: .inf"), ("a.yaml", "a: 1.0e-300"),
        ("a.json", '{"a": "\\u0000"}'), ("a.json", '"\\ud800"'), ("a.json", '{"a\\nb": 1}'),
        ("a.yaml", "a: !!timestamp x"), ("a.yaml", "a: 2001-01-01"), ("a.yaml", "a: !!set {x}"),
        ("a.yaml", "? [a]\n: b"),
        ("a.json", '{"a": {"b": 1, "b": 1}}'), ("a.yaml", "a: 1\na: 1"), ("a.yaml", "a: {b: 1, 'b': 2}"),
        ("a.yaml", "a: !!int x"), ("a.yaml", "a: !!binary x"), ("a.yaml", "no: b"),
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_hostile_files_are_refused_at_once(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    start = process_time()
    with pytest.raises(FileFormatError, match=name) as raised:
        read_data(tmp_path / name)
    assert process_time() - start < 20  # a second where nothing else runs; a bomb would take hours
    assert len(str(raised.value)) < 1000


def test_aliases_that_stand_for_little_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: &b {x: [1, 2]}\nruns: [*b, {<<: *b, y: 3}]")
    assert read_data(tmp_path / "a.yaml")["runs"] == [{"x": [1, 2]}, {"x": [1, 2], "y": 3}]


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_regular_files_are_read_and_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "plan.yaml"
    if kind == "device":
        path.symlink_to("/dev/zero")
    else:
        (os.mkfifo if kind == "pipe" else Path.mkdir)(path)
    for use in (read_data, read_log, read_trace, read_lines, TensorFile, lambda one: write_data(one, {})):
        with pytest.raises(FileFormatError, match="give a regular file"):
            use(path)
