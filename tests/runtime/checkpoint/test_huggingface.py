"""Weights of a split model in files that transformers loads, and files of transformers in a split model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.checkpoint.huggingface import export_safetensors, load_safetensors
from galvatron_lite.runtime.checkpoint.shards import TensorFile, write_tensors
from galvatron_lite.runtime.engine import ParallelModel
from tests.pool import WorkerPool
from tests.runtime.plans import make_plan


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
    layers = discover_layers(model, batch)
    plan = make_plan([[layer.name for layer in layers]], [[strategy] * len(layers)], 4)
    return ParallelModel(model, plan, layers, batch, device="cpu"), batch


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


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


def test_files_of_tensors_are_what_the_library_reads(tmp_path: Path) -> None:
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
