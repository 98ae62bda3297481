"""Faults while checkpoints are written, damaged checkpoints, and the files of other libraries."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

from galvatron_lite import folders
from galvatron_lite.cli import app
from galvatron_lite.errors import FileFormatError, GalvatronError, InputError
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.checkpoint import checkpointer
from galvatron_lite.runtime.checkpoint.huggingface import export_safetensors, load_safetensors
from galvatron_lite.runtime.checkpoint.manifest import META, check_files, checkpoints_of
from galvatron_lite.runtime.checkpoint.plain import read_plain
from galvatron_lite.runtime.checkpoint.shards import TensorFile, write_tensors
from galvatron_lite.runtime.checkpoint.unsplit import load_into
from galvatron_lite.runtime.engine import ParallelModel
from tests.pool import WorkerPool
from tests.runtime.checkpoint.jobs import Case, go_on, groups_of, load, make_net, make_run, same, save
from tests.runtime.cyclic.launched import launch
from tests.runtime.plans import split_model

PAIR = Case([Strategy(zero=2, zero_stage=3)] * 5)
SMALL = 4096


def killed_while_saving(folder: str, asynchronous: bool) -> None:
    """Rank 1 is killed after it has written half of its first file of the second checkpoint."""
    run = make_run(PAIR)
    go_on(run, 1)
    save(run, Path(folder, "step-1"))
    go_on(run, 1)
    write = folders.FileSink.write

    def half(sink: folders.FileSink, data: Any) -> int:
        if dist.get_rank() == 1:
            write(sink, memoryview(data)[: memoryview(data).nbytes // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(sink, data)

    with patch.object(folders.FileSink, "write", half):
        save(run, Path(folder, "step-2"), asynchronous=asynchronous)
        run[0].finish_saving()


def full_disk(folder: str, asynchronous: bool) -> tuple[str, list[float], list[float]]:
    """Save while the files of rank 1 may not grow.

    Returns:
        The error, the losses of two steps after it, and those of a run that resumes from the first checkpoint.
    """
    run, other, told = make_run(PAIR), make_run(PAIR), ""
    go_on(run, 2)
    save(run, Path(folder, "step-1"), step=1)
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, before[1]))
    try:
        save(run, Path(folder, "step-2"), asynchronous=asynchronous)
        run[0].finish_saving()
    except GalvatronError as error:
        told = f"{type(error).__name__}: {error}"
    finally:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    losses = go_on(run, 2)
    load(other, Path(folder, "step-1"))
    return told, losses, go_on(other, 2)


def from_the_last(folder: str) -> tuple[str, list[float]]:
    """The name of the newest checkpoint, and the losses after it."""
    run = make_run(PAIR, seed=4)
    parallel, optimizer, scheduler, data = run
    resumed = parallel.load_latest(folder, optimizer, scheduler=scheduler, data=data)
    return resumed.folder.name, go_on(run, 2)


def without_a_break() -> list[float]:
    return go_on(make_run(PAIR), 3)[2:]


def on_a_tiny_disk(folder: str) -> tuple[str, list[str], list[str]]:
    """Save until the disk is full: the error, the names of intact checkpoints, and of temporary folders left over."""
    run = make_run(PAIR)
    go_on(run, 1)
    try:
        for number in range(20):
            save(run, Path(folder, f"step-{number}"), step=number)
    except GalvatronError as error:
        found = [place.name for place in checkpoints_of(Path(folder)) if check_files(place)]
        return str(error), found, sorted(one.name for one in Path(folder).iterdir() if one.name.startswith("."))
    return "nothing went wrong", [], []


ALONE = Case([Strategy()] * 5)


def test_a_process_killed_while_saving(pool: WorkerPool, tmp_path: Path) -> None:
    other, lost = launch(2, killed_while_saving, 240, folder=str(tmp_path), asynchronous=True)
    assert lost.code == -signal.SIGKILL
    assert re.search(r"PeerError: Rank 0 .*Rank 1 \(.*\) is gone.*load_latest", other.told), other.told
    assert not (tmp_path / "step-2").exists()
    whole = pool.run(2, without_a_break)
    for (name, losses), wanted in zip(pool.run(2, from_the_last, folder=str(tmp_path)), whole, strict=True):
        assert name == "step-1"
        assert losses[::2] == wanted[::2], "what numpy draws is seeded by the pool alone"


def interrupted(folder: str) -> tuple[str, list[str], bool]:
    """Interrupt rank 1 while it saves; then save, and load after a backward pass.

    Returns:
        The error, the folders left over, and whether loading restored the step and dropped the gradients.
    """
    run = make_run(PAIR)
    go_on(run, 1)
    write = checkpointer.write_files

    def stop(*written: Any) -> Any:
        if dist.get_rank() == 1:
            raise KeyboardInterrupt
        return write(*written)

    with patch.object(checkpointer, "write_files", stop), pytest.raises((InputError, KeyboardInterrupt)) as raised:
        save(run, Path(folder, "step-1"))
    left = [one.name for one in Path(folder).iterdir()]
    save(run, Path(folder, "step-1"))
    wanted = go_on(run, 1)[0]
    run[0](**run[3].next()).backward()
    load(run, Path(folder, "step-1"))
    return f"{raised.type.__name__}: {raised.value}", left, go_on(run, 1)[0] == wanted and not run[0].has_gradients()


def test_an_interrupt_of_one_process(pool: WorkerPool, tmp_path: Path) -> None:
    other, stopped = pool.run(2, interrupted, folder=str(tmp_path))
    assert "Rank 1: KeyboardInterrupt" in other[0]
    assert stopped[0].startswith("KeyboardInterrupt: ")
    assert other[1] == [], "rank 0 has removed it"
    assert other[2]
    assert stopped[2]


def test_a_full_disk_of_one_process(pool: WorkerPool, tmp_path: Path) -> None:
    """The files of rank 1 may not grow (RLIMIT_FSIZE); the checkpoint is written while training continues."""
    for told, losses, wanted in pool.run(2, full_disk, folder=str(tmp_path), asynchronous=True):
        assert re.match(r"InputError: checkpoint: .*step-2.* Rank 1: File too large\. Free some space", told), told
        assert losses == wanted, "training goes on as if nothing had been saved"
    assert [one.name for one in tmp_path.iterdir()] == ["step-1"], "nothing is left of the attempt"
    check_files(tmp_path / "step-1")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip("a file system can be mounted by root alone")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_really_full(pool: WorkerPool, tiny_disk: Path) -> None:
    for told, found, left in pool.run(2, on_a_tiny_disk, folder=str(tiny_disk)):
        assert re.search(r"Rank \d: No space left on device\. Free some space", told), told
        assert len(found) >= 2, "those written before are whole"
        assert not left, "nothing is left of the attempt"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run = make_run(ALONE)
    for step in (1, 2):
        go_on(run, 1)
        save(run, folder / f"step-{step}")
    return folder


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 64
    file.write_bytes(content)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.parametrize("spoil", [_flip, _cut, Path.unlink])
@pytest.mark.parametrize("name", [META, "rank-0.safetensors", "rank-0.pt", "training.pt"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    written: Path, tmp_path: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    folder = tmp_path / "all"
    shutil.copytree(written, folder)
    spoil(folder / "step-2" / name)
    parallel, optimizer, scheduler, data = run = make_run(ALONE, seed=4)
    before = {key: value.clone() for key, value in parallel.full_state_dict().items()}
    for use in (lambda: load(run, folder / "step-2"), lambda: load_into(make_net(), folder / "step-2")):
        with pytest.raises(InputError, match=rf"(?s)step-2.*({name}|Make it anew).*"):
            use()
    assert all(torch.equal(value, before[key]) for key, value in parallel.full_state_dict().items())
    with pytest.warns(UserWarning, match=f"(?s){name}.*step-1 .*is loaded instead"):
        found = parallel.load_latest(folder, optimizer, scheduler=scheduler, data=data)
    assert found.folder.name == "step-1"


def test_nothing_of_a_file_is_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'sprung'}",)

    torch.save({"random": Trap()}, tmp_path / "trap.pt")
    with pytest.raises(FileFormatError, match="not opened in any other way"):
        read_plain(tmp_path / "trap.pt")
    assert not (tmp_path / "sprung").exists()


def test_a_folder_that_holds_something_else_is_not_replaced(written: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    run = make_run(ALONE)
    with pytest.raises(InputError, match="holds something else"):
        save(run, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(InputError, match="holds something else"):
        save(run, written)


def test_what_could_not_be_read_again_is_not_saved(tmp_path: Path) -> None:
    run = make_run(ALONE)
    with pytest.raises(InputError, match=r"kept\['best'\] is no tensor, number or text"):
        save(run, tmp_path / "step-1", extra={"kept": {"best": Path("x")}})
    assert not any(tmp_path.iterdir())


def test_the_command_shows_checkpoints_and_finds_damage(written: Path, tmp_path: Path) -> None:
    def said(*words: str) -> list[str]:
        done = CliRunner().invoke(app, ["checkpoint", *words])
        assert done.exception is None or isinstance(done.exception, FileFormatError), done.output
        return done.output.splitlines() if done.exception is None else [str(done.exception)]

    lines = said("show", str(written))
    assert [re.sub(r" [\d.]+ \w+,", "", line.rpartition("/")[2]) for line in lines] == [
        f"step-{step}: step {step}, 1 process(es), states of AdamW" for step in (2, 1)
    ]
    assert all("whole, 4 files" in line for line in said("check", str(written)))
    shutil.copytree(written, tmp_path / "all")
    _flip(tmp_path / "all" / "step-1" / "rank-0.pt")
    assert ["rank-0.pt" in line for line in said("check", str(tmp_path / "all" / "step-1"))] == [True]


def test_another_model_or_optimizer_is_refused(written: Path) -> None:
    model = make_net()
    with pytest.raises(InputError, match="states of a AdamW"):
        load_into(model, written / "step-1", torch.optim.SGD(model.parameters()))
    adam = torch.optim.AdamW(groups_of(model))
    constant = torch.optim.lr_scheduler.ConstantLR(adam)
    with pytest.raises(InputError, match=r"scheduler: 'ConstantLR'.*states of a SequentialLR"):
        load_into(model, written / "step-1", adam, scheduler=constant)
    extra = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(InputError, match="parameter"):
        load_into(model, written / "step-1", torch.optim.AdamW([*model.parameters(), extra]))
    assert not adam.state
    model.blocks[0].linear = torch.nn.Linear(3, 3)
    with pytest.raises(InputError, match="has the shape"):
        load_into(model, written / "step-1")
    with pytest.raises(InputError, match="this model has none"):
        load_into(torch.nn.Linear(2, 2), written / "step-1")
    model = make_net()
    with pytest.raises(InputError, match=r"other options than .*'lr': 0.02"):
        load_into(model, written / "step-1", torch.optim.AdamW(model.parameters()))
    del model.blocks[2]
    with pytest.raises(InputError, match=r"blocks.2.*this model has none"):
        load_into(model, written / "step-1")


def llama(seed: int) -> nn.Module:
    """Tied, from its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def split(model: nn.Module, strategy: Strategy) -> tuple[ParallelModel, Any]:
    tokens = torch.arange(32).reshape(4, 8)
    batch = {"input_ids": tokens, "labels": tokens}
    return split_model(model, batch, strategy), batch


def there_and_back(folder: str) -> None:
    from transformers import AutoModelForCausalLM

    place = Path(folder)
    parallel, batch = split(llama(0), Strategy(tensor=2))
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    parallel.train_step(batch, optimizer)
    parallel.save(place / "step", optimizer)
    wanted = parallel.full_state_dict()
    if dist.get_rank() == 0:
        assert export_safetensors(place / "step", place / "one") == ["model.safetensors"]
        assert len(export_safetensors(place / "step", place / "many", largest="9KiB")) > 3
        for name in ("one", "many"):
            loaded = AutoModelForCausalLM.from_pretrained(place / name)
            same(loaded.state_dict(), wanted)
        loaded.save_pretrained(place / "theirs")
        with pytest.raises(InputError, match="holds something already"):
            export_safetensors(place / "step", place / "one")
    dist.barrier()
    for name in ("many", "theirs"):
        other, _ = split(llama(1), Strategy(zero=2, zero_stage=3))
        load_safetensors(other, place / name)
        same(other.full_state_dict(), wanted)
        plain = llama(2)
        load_safetensors(plain, place / name)
        same(plain.state_dict(), wanted)


def test_transformers_loads_what_was_exported_and_the_other_way_round(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, there_and_back, folder=str(tmp_path))


def test_safetensors_reads_our_files_and_we_read_its_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {
        "a.weight": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.tensor(3), "d": torch.tensor([True]),
        "e": torch.empty(0, 4), "f": torch.randn(2, 2).double(), "g": torch.randn(6).half()[::2],
    }  # fmt: skip
    write_tensors(tmp_path / "ours", tensors)
    same(load_file(tmp_path / "ours"), tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "theirs")
    for name in ("ours", "theirs"):
        file = TensorFile(tmp_path / name)
        same({key: file.tensor(key) for key in file.places}, tensors)


@pytest.mark.parametrize("where", ["empty", "length", "header", "offsets", "short"])
def test_files_that_are_not_of_tensors(tmp_path: Path, where: str) -> None:
    path = tmp_path / "file"
    write_tensors(path, {"a": torch.randn(9)})
    good = path.read_bytes()
    bad = {
        "empty": b"", "length": b"\xff" * 8 + good[8:], "header": good[:8] + b"[" + good[9:],
        "offsets": good.replace(b"[0,36]", b"[4,36]"), "short": good[:-1],
    }[where]  # fmt: skip
    path.write_bytes(bad)
    with pytest.raises(FileFormatError, match="Use another checkpoint"):
        TensorFile(path)
