"""Names, files, flags and errors of models given by their shapes."""

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import from_data, read_value, to_data, write_data, write_value
from galvatron_lite.folders import config_folder
from galvatron_lite.model.graph import ModelGraph, Recompute, Role
from galvatron_lite.model.shapes import (
    DecoderShape,
    ResNetShape,
    build_graph,
    load_model,
    load_shape,
    model_names,
    shape_from_data,
    shape_from_flags,
)
from tests.processor_time import least

LEAN = """
import sys, time  # time of this process alone, whatever else the machine does
start = time.process_time()
from galvatron_lite.model.shapes import load_model
graphs = [load_model(name) for name in sys.argv[1:]]
print(time.process_time() - start, "torch" in sys.modules, len(graphs))
"""


def test_shipped_models_load_fast_and_without_torch() -> None:
    """All of them together, and one, in a new process; the best of some runs, so that a busy machine matters little."""

    def seconds(names: Sequence[str]) -> float:
        done = subprocess.run([sys.executable, "-c", LEAN, *names], capture_output=True, text=True, check=True)
        took, with_torch, _ = done.stdout.split()
        assert with_torch == "False"
        return float(took)

    for names in (model_names(), ["llama3-8b"]):
        limit = 0.3 * len(names)
        assert least(partial(seconds, names), limit) < limit


@pytest.mark.parametrize("name", model_names())
def test_a_shipped_graph_is_sound_and_survives_a_file(name: str, tmp_path: Path) -> None:
    graph = load_model(name)
    write_value(tmp_path / "graph.yaml", graph)
    assert read_value(ModelGraph, tmp_path / "graph.yaml") == graph
    check_order(graph)
    roles = [layer.role for layer in graph.layers]
    assert roles == [Role.BEFORE, *[Role.BLOCK] * (len(roles) - 2), Role.AFTER]
    assert len({layer.name for layer in graph.layers}) == len(graph.layers)
    assert {layer.kind for layer in graph.layers} == set(graph.kinds)
    assert all(kind.name == key for key, kind in graph.kinds.items())


BRANCHED = [name for name in model_names() if name.startswith("perception")]


@pytest.mark.parametrize("name", BRANCHED)
def test_what_enters_a_layer_is_a_tensor_that_it_reads(name: str) -> None:
    """Where layers are no chain: one of those that others give it, or the batch's picture."""
    graph = load_model(name)
    for layer in graph.layers[1:]:
        read = {tensor.size for tensor in graph.tensors if tensor.size and layer.name in tensor.readers}
        assert graph.kind_of(layer).input_bytes in (read or {graph.kinds["before"].output_bytes}), layer.name


@pytest.mark.parametrize("name", sorted({*model_names()}.difference(BRANCHED)))
def test_boundary_tensors_meet(name: str) -> None:
    graph = load_model(name)
    kinds = [graph.kind_of(layer) for layer in graph.layers]
    for first, second in pairwise(kinds):
        taken = second.input_bytes
        if first.name == "encoder_block" and second.name == "bridge":
            taken -= 8 * second.dims.sequence  # the decoder's own token indices
        if first.name == "decoder_block" and second.name == "after":
            taken += 2 * graph.sequence * 1024  # the encoder's output ends here
        assert first.output_bytes == taken, (first.name, second.name)


def check_order(graph: ModelGraph) -> None:
    for kind in graph.kinds.values():
        kept = [kind.kept[choice].total for choice in (Recompute.FULL, Recompute.SELECTIVE, Recompute.NONE)
                if choice in kind.kept]  # fmt: skip
        assert kept == sorted(kept)
        assert Recompute.NONE in kind.kept
        assert all(figure >= 0 for part in (kind.working, kind.forward_working) for figure in
                   (part.tensor, part.sequence, part.whole))  # fmt: skip


@st.composite
def decoders(draw: st.DrawFn) -> DecoderShape:
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    return DecoderShape(
        layers=draw(st.integers(1, 5)),
        hidden=heads * draw(st.sampled_from([8, 16])),
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=draw(st.integers(1, 300)),
        gated_mlp=draw(st.booleans()),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        fused_norm=draw(st.booleans()),
        activation=draw(st.sampled_from(["gelu", "silu", "relu"])),
        biases=draw(st.booleans()),
        positions=draw(st.sampled_from(["learned", "rotary", "none"])),
        vocab=draw(st.integers(2, 500)),
        vocab_multiple=draw(st.sampled_from([1, 64])),
        tied_embeddings=draw(st.booleans()),
        seq_len=draw(st.integers(1, 64)),
        dropout=draw(st.sampled_from([0.0, 0.1])),
    )


@settings(max_examples=60, deadline=None)
@given(decoders(), st.sampled_from(["bf16", "fp32"]))
def test_any_decoder_makes_a_sound_graph(shape: DecoderShape, precision: str) -> None:
    graph = build_graph(shape, precision=precision)
    check_order(graph)
    assert from_data(ModelGraph, to_data(graph), "graph") == graph
    block = graph.kinds["block"]
    assert shape.heads % block.tensor_degrees == 0
    assert shape.ffn_hidden % block.tensor_degrees == 0
    assert block.kept[Recompute.NONE].at(2, True) <= block.kept[Recompute.NONE].at(2, False)
    longer = build_graph(shape, sequence=1, precision=precision)
    assert longer.parameters == graph.parameters


@settings(max_examples=30, deadline=None)
@given(decoders())
def test_flags_say_what_a_file_says(shape: DecoderShape) -> None:
    flags = {f"--{name.replace('_', '-')}": str(value) for name, value in to_data(shape).items()}
    assert build_graph(shape_from_flags(flags)).kinds == build_graph(shape).kinds


def test_short_flags() -> None:
    flags = {"layers": "32", "hidden": "4096", "heads": "32", "vocab": "32000", "seq": "2048", "ffn": "11008"}
    shape = shape_from_flags(flags | {"gated-mlp": "true", "norm": "rmsnorm", "biases": "false", "tied": "false"})
    rotary = load_shape("llama2-7b", overrides={"positions": "learned", "seq_len": 2048, "activation": "gelu"})
    assert build_graph(shape).kinds == build_graph(rotary).kinds
    assert shape_from_flags({"arch": "resnet", "depths": "3,4,6,3"}) == ResNetShape(name="flags")


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"layers": "2", "hidden": "8", "heads": "2", "vocab": "9", "seq": "4", "colour": "red"}, "--colour"),
        ({"layers": "2", "hidden": "9", "heads": "2", "vocab": "9", "seq": "4"}, "heads"),
        ({"layers": "0", "hidden": "8", "heads": "2", "vocab": "9", "seq": "4"}, "layers"),
        ({"layers": "two", "hidden": "8", "heads": "2", "vocab": "9", "seq": "4"}, "shape flags, layers"),
        ({"hidden": "8", "heads": "2", "vocab": "9", "seq": "4"}, "shape flags, layers"),
        ({"layers": "2", "hidden": "8", "heads": "4", "kv-heads": "3", "vocab": "9", "seq": "4"}, "kv_heads"),
        ({"layers": "2", "hidden": "8", "heads": "2", "vocab": "9", "seq": "4", "dropout": "1.5"}, "dropout"),
        ({"arch": "diffusion"}, "shape flags, arch"),
        ({"arch": "convnext", "depths": "3,3", "widths": "8"}, "depths"),
        ({"arch": "resnet", "depths": "3,-1"}, "depths"),
        ({"arch": "vit", "layers": "2", "hidden": "8", "heads": "2", "patch": "15"}, "patch"),
    ],
)
def test_wrong_flags_are_named(flags: dict[str, str], field: str) -> None:
    with pytest.raises(InputError) as error:
        shape_from_flags(flags)
    assert error.value.field == field


def test_unknown_name_suggests_the_closest_or_lists_all() -> None:
    with pytest.raises(InputError, match="Did you mean llama3-8b"):
        load_model("lama3-8b")
    with pytest.raises(InputError) as error:
        load_model("of-my-own")
    assert all(name in error.value.remedy for name in model_names())


def test_model_file_by_path_with_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    write_data(path, {"layers": 2, "hidden": 64, "heads": 4, "vocab": 100, "seq_len": 32})
    graph = load_model(str(path), overrides={"layers": 3}, sequence=16, precision="fp32")
    assert (graph.name, len(graph.layers), graph.sequence, graph.precision) == ("mine", 5, 16, "fp32")
    assert graph.ties[0].parameters == 6400


@pytest.mark.parametrize("data", ["just text", ["a", "list"], {"layers": 2, "colour": "red"}])
def test_file_that_is_no_model(tmp_path: Path, data: object) -> None:
    path = tmp_path / "bad.yaml"
    write_data(path, data)
    with pytest.raises(FileFormatError):
        load_model(str(path))


def test_fields_that_a_model_file_lacks_or_has_beside_its_own_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    fields = {"layers": 1, "hidden": 8, "heads": 2, "vocab": 9}
    write_data(path, fields | {"ffn": 16})
    with pytest.raises(FileFormatError, match=r"mine\.yaml, ffn: 16 .* Did you mean ffn_hidden"):
        load_model(str(path))
    write_data(path, fields)
    with pytest.raises(FileFormatError, match=r"mine\.yaml, seq_len is missing"):
        load_model(str(path))


@pytest.mark.parametrize(
    ("name", "sequence", "precision", "field"),
    [
        ("gpt2", 2048, "bf16", "seq_len"),
        ("resnet50", 16, "bf16", "sequence"),
        ("gpt2", 0, "bf16", "seq_len"),
        ("gpt2", None, "bf17", "precision"),
    ],
)
def test_what_a_graph_cannot_be_built_for(name: str, sequence: int | None, precision: str, field: str) -> None:
    with pytest.raises(InputError) as error:
        load_model(name, sequence=sequence, precision=precision)
    assert error.value.field == field


def test_experts_must_be_enough_and_some_blocks_must_have_them() -> None:
    fields = {"arch": "moe", "layers": 1, "hidden": 8, "heads": 2, "vocab": 9, "seq_len": 4, "n_experts": 4}
    with pytest.raises(InputError, match="moe_topk"):
        shape_from_data(fields | {"moe_topk": 5})
    with pytest.raises(InputError, match="dense_layers"):
        shape_from_data(fields | {"dense_layers": 1})
    with pytest.raises(InputError, match="capacity"):
        shape_from_data(fields | {"capacity": 0.5})
    with pytest.raises(InputError, match="rope_dim"):
        shape_from_data(fields | {"kv_rank": 4, "rope_dim": 4})
    with pytest.raises(InputError, match="printable, in one line"):
        shape_from_data(fields | {"name": "gpt\n--load /evil"})


def test_config_folder_of_nothing() -> None:
    assert config_folder("models").is_dir()
    with pytest.raises(InputError, match="install"):
        config_folder("poems")


def test_config_folder_of_an_installed_package_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "galvatron_lite"
    for folder in (tmp_path / "configs" / "models", package / "configs" / "models"):
        folder.mkdir(parents=True)
    monkeypatch.setattr("galvatron_lite.folders._PACKAGE", package)
    assert config_folder("models") == package / "configs" / "models"
