"""Layer counts and hidden sizes of a model, which Hetu-Galvatron's profile files do not hold."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Role
from galvatron_lite.peers.hetu.files import LAYER_TIME, Sizes

ASK = "Give --layers and --hidden, one number for each layer type, joined by commas (24,24)."
WHERE = (
    "They are in the model's configuration, for each part in turn (encoder, decoder; stages of pictures): "
    "num_layers or depths, and hidden_size or d_model (doubled in every next stage of a Swin)."
)
SEARCHES = "searches.jsonl"
"""Recorded searches, a line of JSON each, beside the folders of profiles, where there are any."""


def sizes_for(folder: Path, layers: str = "", hidden: str = "", sequence: str = "") -> list[Sizes]:
    """What ``import_profile`` needs of each layer type.

    Args:
        folder: of the profile; where neither layers nor hidden are given, its name is looked up among our models.
        layers, hidden: numbers joined by commas, one for each layer type.
        sequence: the same; the length that was profiled if not given.

    Raises:
        InputError: an unknown model, or a number that is none.
    """
    lengths = _numbers(sequence, "--seq") if sequence else []
    if not layers and not hidden:
        known = _known(folder)
        return [Sizes(count, wide, lengths[place] if place < len(lengths) else 0)
                for place, (count, wide) in enumerate(known)]  # fmt: skip
    counts, widths = _numbers(layers, "--layers"), _numbers(hidden, "--hidden")
    lengths = lengths or [0] * len(counts)
    for option, numbers in (("--hidden", widths), ("--seq", lengths)):
        if len(numbers) != len(counts):
            raise InputError(option, ",".join(map(str, numbers)), f"--layers has {len(counts)} layer types.")
    return [Sizes(*one) for one in zip(counts, widths, lengths, strict=True)]


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise InputError(option, text or None, ASK)
    return numbers


def _known(folder: Path) -> list[tuple[int, int]]:
    """(layers, hidden) of each layer type of the model of ours that is called like the profile."""
    from galvatron_lite.model.shapes import load_model

    name = _model_name(folder)
    try:
        graph = load_model(name.lower())
    except InputError:
        raise InputError("model", name, f"It is none of the shipped ones. {_ask(folder, name)}") from None
    blocks = [layer.kind for layer in graph.layers if layer.role is Role.BLOCK]
    found = [(len(list(same)), graph.kinds[kind].dims.hidden) for kind, same in groupby(blocks)]
    if len(found) != _profiled_types(folder):
        unlike = f"The profile has {_profiled_types(folder)} layer types, ours {len(found)}."
        raise InputError("model", name, f"{unlike} {_ask(folder, name)}")
    return found


def _ask(folder: Path, name: str) -> str:
    """What to give: the numbers of a search recorded beside the profile, or where people find them."""
    path = folder.parent / SEARCHES
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else ()
    layers = next((search["layers"] for search in map(json.loads, lines) if search["model"] == name), None)
    if layers is None:
        return f"{ASK} {WHERE}"
    counts, widths = (",".join(str(one[place]) for one in layers) for place in (0, 1))
    return f"Give --layers {counts} --hidden {widths}: those of the searches in {path}."


def _model_name(folder: Path) -> str:
    """The model's name in that of its computation profile."""
    paths = sorted(folder.glob("computation_profiling_*.json"))
    if not paths:
        raise InputError(str(folder), "computation_profiling_*.json", "There is no such file; give the model's folder.")
    return paths[0].stem.removeprefix("computation_profiling_").split("_", 1)[-1].removesuffix("_all")


def _profiled_types(folder: Path) -> int:
    path = sorted(folder.glob("computation_profiling_*.json"))[0]
    found = (LAYER_TIME.match(key) for key in json.loads(path.read_text(encoding="utf-8")))
    return len({hit[1] for hit in found if hit})
