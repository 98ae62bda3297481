"""Models by name: one set for every command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from galvatron_lite.capture.named import graph_named
from galvatron_lite.capture.trace import trace
from galvatron_lite.cli import app
from galvatron_lite.errors import FileFormatError, GalvatronError, InputError
from galvatron_lite.model.example import example_batch
from galvatron_lite.model.shapes import load_model, model_names
from galvatron_lite.model.zoo import SIZES, build
from galvatron_lite.verify.source import build_named


def test_a_small_model_of_the_zoo_is_traced() -> None:
    model = build("gpt-tiny", sequence=32)
    found = graph_named("gpttiny", sequence=32, precision="fp32")
    assert found == trace(model, example_batch(model), precision="fp32", name="gpt-tiny")
    assert found.sequence == 32
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_shipped_models_match_their_files() -> None:
    assert graph_named("resnet-50", precision="fp32") == load_model("resnet50", precision="fp32")
    with pytest.raises(InputError, match="has none"):
        graph_named("resnet50", sequence=8)


def test_every_name_is_known_to_what_builds_and_one_that_is_not_tells_all() -> None:
    with pytest.raises(InputError) as unknown:
        graph_named("of-my-own")
    assert all(f"{name}," in unknown.value.remedy.replace(";", ",") for name in model_names())
    small = set(SIZES) - {"resnet-50", "resnet-152", "vgg-16"} - set(model_names())
    assert {"gpt-tiny", "moe-tiny", "convnext-mini"} <= small
    assert all(name in unknown.value.remedy for name in small)
    with torch.device("meta"):
        assert build_named("gpt-tiny", 16).config.sequence == 16


SMALL = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3},
    "bert": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2},
    "vit": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of graphs and a hub of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path, kind: str, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 64, **SMALL[kind], **fields}))
    return folder


@pytest.mark.parametrize(("kind", "tokens"), [("llama", 32), ("bert", 32), ("t5", 32), ("vit", None)])
def test_a_model_of_every_kind_is_traced(tmp_path: Path, kind: str, tokens: int | None) -> None:
    """The folder and its file give the same graph, of as many parameters as the model has."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM
    from transformers import AutoModelForSeq2SeqLM as AutoModelForBoth

    folder = write(tmp_path / kind, kind)
    graph = graph_named(str(folder), sequence=tokens, precision="fp32")
    auto = {"llama": AutoModelForCausalLM, "bert": AutoModelForMaskedLM, "t5": AutoModelForBoth}
    model = auto.get(kind, AutoModelForImageClassification).from_config(AutoConfig.from_pretrained(folder))
    assert graph.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert graph.name == kind
    assert graph.sequence == (tokens or 197)
    assert graph == graph_named(str(folder / "config.json"), sequence=tokens, precision="fp32")


def test_the_second_call_plans_without_torch(tmp_path: Path) -> None:
    folder = write(tmp_path / "llama", "llama")
    graph_named(str(folder), sequence=32)
    code = (
        "import sys; from galvatron_lite import plan; "
        f"plan(model={str(folder)!r}, sequence=32, cluster='a100-40gb', gpus=2, batch=16, precision='bf16'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_changed_file_is_traced_anew(tmp_path: Path) -> None:
    graphs = [graph_named(str(write(tmp_path / "bert", "bert", num_hidden_layers=n)), sequence=32) for n in (2, 3)]
    assert [len(graph.layers) for graph in graphs] == [4, 5]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type": "no-such-model"}', "has no such model"),
        (
            '{"architectures": ["My"], "auto_map": {"AutoModel": "mine.My"}}',
            "code beside the file is not run",
        ),
        ('{"model_type": "llama", "hidden_size": 33, "num_attention_heads": 0}', "cannot build it"),
        ('{"model_type": "clip_vision_model"}', "computes a loss for no model"),
        ('{"model_type": "llama",', "JSON"),
    ],
)
def test_errors_of_bad_files_name_the_fault(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(GalvatronError, match=said):
        graph_named(str(path))


def test_names_that_cannot_be_resolved(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no config"):
        graph_named(str(tmp_path))
    with pytest.raises(InputError, match="local cache does not hold"):
        graph_named("nobody/no-such-model")
    with pytest.raises(FileFormatError):
        graph_named(str(tmp_path / "none.json"))
    with pytest.raises(InputError, match="64 positions"):
        graph_named(str(write(tmp_path / "llama", "llama", max_position_embeddings=64)), sequence=128)


@pytest.mark.parametrize("words", [("profile", "train.py"), ("plan", "--model", "train.py", "--cluster", "h100")])
def test_a_file_without_the_name_of_its_function(words: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=r"'train\.py' cannot be used\. Name the function.*train\.py:make_model"):
        CliRunner().invoke(app, words, catch_exceptions=False)
