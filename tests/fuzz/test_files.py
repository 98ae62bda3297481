"""A share of ``scripts/fuzz``: whatever a file holds, commands end well or with an error of our own."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from galvatron_lite.cli import main
from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.files import read_data
from scripts.fuzz import OURS, run
from tests.fuzz.cases import KINDS, READERS, case
from tests.fuzz.damage import FREE, places


def test_mutated_files_end_in_nothing_but_our_errors(tmp_path: Path) -> None:
    for number in range(32):
        ending, said = run(number, tmp_path)
        assert ending in OURS, f"case {number}: {said}"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_has_a_valid_file(kind: str) -> None:
    assert KINDS[kind][0](random.Random(0))


@pytest.mark.parametrize("kind", sorted(READERS))
def test_nothing_but_a_number_is_one(tmp_path: Path, kind: str) -> None:
    valid, read = READERS[kind]
    data, path, seen = json.loads(json.dumps(valid(random.Random(0)))), tmp_path / "file.json", set[str]()
    for owner, key in list(places(data)):
        old, name = owner[key], str(key)
        if type(old) not in (int, float) or name in (*FREE, *seen):
            continue
        seen.add(name)
        whole = type(old) is int and name != "samples"  # a profile has halves of one, too
        for wrong in (True, str(old), float(old))[: 2 + whole]:
            owner[key] = wrong
            path.write_text(json.dumps(data))
            with pytest.raises(InputError) as refused:
                read(path)
            assert name in refused.value.field, (name, wrong)
            assert refused.value.value == wrong
            assert f"{wrong!r} cannot be used" in str(refused.value)
        owner[key] = old
    assert seen


@pytest.mark.parametrize("call", ["os.system", "subprocess.getoutput"])
def test_nothing_in_a_file_is_executed(tmp_path: Path, call: str) -> None:
    trap = tmp_path / "trap"
    (tmp_path / "file.yaml").write_text(f"!!python/object/apply:{call} ['touch {trap}']")
    with pytest.raises(GalvatronError):
        read_data(tmp_path / "file.yaml")
    assert not trap.exists()


@pytest.mark.parametrize(
    ("option", "rest"),
    [
        ("--timeout", "launch --gpus 1 train.py"), ("--seconds", "explain plan.json"), ("--search", "report plan.json"),
        ("--tolerance", "plan --batch 8"), ("--margin", "plan --batch 8"), ("--price", "plan --batch 8"),
        ("--batch", "plan"), ("--batch", "evaluate plan.json"), ("--max-batch", "plan --best-batch"),
        ("--group", "oracle resnet50 --cluster abci --gpus 4"), ("--max-samples", "profile llama2-7b --estimate"),
    ],
)  # fmt: skip
def test_numbers_of_options_that_cannot_be_are_refused_at_once(
    tmp_path: Path, option: str, rest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case(0, tmp_path)
    monkeypatch.chdir(tmp_path)
    command, *words = rest.split()
    words += ["--profile", "profile.json"] if command in ("plan", "evaluate", "explain", "report") else []
    for value in ("nan", "inf", "-1", "1e400", "1" + "0" * 18)[: 4 + (option != "--price")]:
        monkeypatch.setattr("sys.argv", ["galvatron", command, option, value, *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code, option[2:] in capsys.readouterr().err) in [(1, True), (2, True)], value
