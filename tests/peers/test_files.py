"""Reading Hetu-Galvatron's profile files."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from galvatron_lite.errors import InputError
from galvatron_lite.peers.hetu.files import Sizes, read_hardware, read_model
from galvatron_lite.peers.hetu.model import Engine
from tests.studies.hetu.cases import FOLDER

LLAMA = Sizes(32, 4096, 2048)
BERT = Sizes(24, 1024, 512)


def raw(path: str) -> dict[str, float]:
    return dict(json.loads((FOLDER / path).read_text()))


def test_batches_lie_on_a_line() -> None:
    kind = read_model(FOLDER / "llama2-7b", [LLAMA]).types[0]
    times = raw("llama2-7b/computation_profiling_bf16_llama2-7b.json")
    for batch in (4, 8, 12):
        assert kind.forward.at(batch) == pytest.approx(batch * times[f"layertype_0_bsz{batch}_seq2048"], rel=0.02)
    assert (kind.parameters, kind.activation[8], kind.checkpoint) == (778.2236328125, 68.3204345703125, 32.0)


def test_lengths_lie_on_a_parabola() -> None:
    kind = read_model(FOLDER / "bert-large", [BERT]).types[0]
    times = raw("bert-large/computation_profiling_bf16_bert-large.json")
    lengths = [128 * step for step in range(1, 9)]
    fitted = np.polyfit(lengths, [times[f"layertype_0_bsz1_seq{length}"] for length in lengths], 2)
    assert kind.forward.slope == pytest.approx(float(np.polyval(fitted, 512)))
    # memory: that of the longest sequence in proportion, parameters of the shortest
    assert kind.activation[1] == pytest.approx(383.56884765625 / 4)
    assert kind.parameters == 40.8896484375


def test_releases_scale_embeddings_differently() -> None:
    new, old = (read_model(FOLDER / "bert-large", [BERT], engine=engine) for engine in Engine)
    longest = 356.048828125
    assert new.whole.activation[1] == pytest.approx(longest / 4)
    assert old.whole.activation[1] == pytest.approx(longest * (2 / 3 + 1 / 3 / 4))


def test_several_layer_types() -> None:
    swin = [Sizes(*one) for one in ((2, 320, 3136), (2, 640, 784), (42, 1280, 196), (2, 2560, 49))]
    model = read_model(FOLDER / "swin-huge", swin)
    assert [kind.parameters for kind in model.types] == [6.5166015625, 19.447265625, 79.009765625, 304.0]
    assert not model.sequence_parallel
    assert [model.type_of(place).hidden for place in (0, 3, 4, 45, 46)] == [320, 640, 1280, 1280, 2560]


def test_hardware() -> None:
    one, two = (read_hardware(FOLDER / "hardware", nodes, 8) for nodes in (1, 2))
    assert (one.near[8], one.far[4], one.send[2]) == (154.203, 155.815, 163.671)
    assert one.gather[8].points[16] == pytest.approx(0.2941 / 2, rel=1e-3)
    assert (two.ms_per_mb(16, apart=False), two.ms_per_mb(2, apart=True)) == (1 / 44.682, 1 / 8.13007)
    assert two.gather.keys() == one.gather.keys()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(FOLDER / "llama2-7b", tmp_path / "llama")
    shutil.copytree(FOLDER / "hardware", tmp_path / "hardware")
    return tmp_path


def change(path: Path, key: str, value: object) -> None:
    data = json.loads(path.read_text())
    data[key] = value
    path.write_text(json.dumps({name: held for name, held in data.items() if held is not None}))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"computation_profiling_\*\.json"):
        read_model(tmp_path, [LLAMA])
    with pytest.raises(InputError, match="allreduce_bandwidth_1nodes_8gpus"):
        read_hardware(tmp_path, 1, 8)


@pytest.mark.parametrize(
    ("key", "value"),
    [("layertype_0_sp", None), ("other_memory_pp_off_sp", None), ("layertype_0_sp", {"2048": {}})],
)
def test_a_missing_key_is_named(copied: Path, key: str, value: object) -> None:
    change(copied / "llama" / "memory_profiling_bf16_llama2-7b.json", key, value)
    with pytest.raises(InputError, match=r"memory_profiling_bf16_llama2-7b\.json, \w+ is missing"):
        read_model(copied / "llama", [LLAMA])


def test_a_figure_that_is_no_number_is_named(copied: Path) -> None:
    change(copied / "llama" / "computation_profiling_bf16_llama2-7b.json", "layertype_0_bsz3_seq2048", "fast")
    with pytest.raises(InputError, match="layertype_0_bsz3_seq2048: 'fast'"):
        read_model(copied / "llama", [LLAMA])
    change(copied / "hardware" / "overlap_coefficient.json", "overlap_coe", None)
    with pytest.raises(InputError, match="overlap_coe is missing"):
        read_hardware(copied / "hardware", 1, 8)


def test_a_length_that_was_not_profiled_is_named() -> None:
    with pytest.raises(InputError, match="Lengths profiled: 2048"):
        read_model(FOLDER / "llama2-7b", [Sizes(32, 4096, 4096)])


def test_two_profiles_in_a_folder_are_told(copied: Path) -> None:
    path = copied / "llama" / "computation_profiling_bf16_llama2-7b.json"
    shutil.copy(path, path.with_name("computation_profiling_bf16_other.json"))
    with pytest.raises(InputError, match="Several match"):
        read_model(copied / "llama", [LLAMA])
