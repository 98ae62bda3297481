"""Graphs from configurations of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from galvatron_lite.capture.named import graph_named
from galvatron_lite.errors import FileFormatError, GalvatronError, InputError

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
def test_bad_files_say_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
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
