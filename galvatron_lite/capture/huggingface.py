"""Graphs of transformers' models from their configurations: ``config.json``, its folder, or a name in the local cache.

A model is made on the meta device and traced on an example batch. Its graph is cached in a file, from which the next
call reads it without importing torch.
"""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import from_data, kind_of, read_data, to_data, write_data
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.trainable import Trainable

if TYPE_CHECKING:
    from torch import nn


LONGEST = 4096
"""Default of tokens a sample, if the configuration allows as many."""
_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_TASKS = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION",
          "AUDIO_CLASSIFICATION", "CTC")  # fmt: skip
"""Tasks of transformers whose models compute a loss. A type's first task counts if its file names no class."""

_RANDOM_FIELDS = {"layerdrop", "encoder_layerdrop", "decoder_layerdrop", "apply_spec_augment", "mask_time_prob"}
"""Fields that skip layers, or overwrite inputs, at random. They are zeroed: plans are for all layers."""


def find_config(name: str) -> Path | None:
    """Find the ``config.json`` that a name stands for; None if it is no configuration of transformers.

    Args:
        name: of a folder that holds ``config.json``, of such a file, or of a model in the Hugging Face hub's local
            cache (``meta-llama/Llama-3.1-8B``). Nothing is downloaded.

    Raises:
        InputError: a folder without ``config.json``, or a name of the hub that is not in the cache.
        FileFormatError: the file cannot be read.
    """
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError("model", name, "The folder holds no config.json, as save_pretrained writes it.")
        return path / "config.json"
    if path.suffix == ".json":
        data = read_data(path)
        return path if isinstance(data, dict) and {"model_type", "architectures"} & data.keys() else None
    if not _HUB.fullmatch(name) or path.suffix in (".yaml", ".yml") or path.exists():
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):  # huggingface_hub's error for a name that no repository may have
        cached = None
    if not isinstance(cached, str):
        remedy = (
            "It is no file here, and the Hugging Face hub's local cache does not hold its config.json. Download it "
            f"(hf download {name} config.json), or give the path of a config.json."
        )
        raise InputError("model", name, remedy)
    return Path(cached)


def graph_of_config(
    path: Path, *, sequence: int | None = None, precision: str = "bf16", trainable: Trainable | None = None
) -> ModelGraph:
    """Return the graph of the model that a configuration describes, from the cache if it is there.

    Args:
        path: of the ``config.json``.
        sequence: tokens a sample; if None the model's positions, ``LONGEST`` at most.
        precision: of compute.
        trainable: which parameters train; all if None.

    Raises:
        InputError: transformers is missing, or has no such model with a loss; or more tokens than positions.
        FileFormatError: the file does not describe a model.
        TraceError: the model cannot be captured.
    """
    cached = _cache_file(path, sequence, precision, trainable)
    if cached.is_file():
        try:
            return from_data(ModelGraph, read_data(cached), str(cached))
        except FileFormatError:
            cached.unlink(missing_ok=True)  # written by another version, or not to its end
    graph = _traced(path, sequence, precision, trainable)
    with suppress(OSError):  # planning goes on without a cache
        write_data(cached, to_data(graph))
    return graph


def _cache_file(path: Path, sequence: int | None, precision: str, trainable: Trainable | None) -> Path:
    """The cache of a graph: its name is a hash of the configuration, the options, and the versions of all code."""
    versions = []
    for package in ("transformers", "torch", "galvatron_lite"):
        try:
            versions.append(version(package))
        except PackageNotFoundError:
            versions.append("")
    sources = [str(file.stat().st_mtime_ns) for file in sorted(Path(__file__).parent.glob("*.py"))]
    text = [path.read_text(encoding="utf-8"), str(sequence), precision, str(trainable), *versions, *sources]
    digest = hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "galvatron_lite" / "graphs" / f"{digest}.json"


def _traced(path: Path, sequence: int | None, precision: str, trainable: Trainable | None) -> ModelGraph:
    import torch

    from galvatron_lite.capture.adapters import make_trainable
    from galvatron_lite.capture.trace import trace
    from galvatron_lite.model.example import example_batch

    with torch.device("meta"):
        model = build_model(path)
    try:
        batch = example_batch(model, sequence=_sequence(model.config, sequence, path))
    except InputError as error:
        if error.field != "batch":
            raise
        remedy = f"What a {type(model).__name__} takes is not known. Give the model itself: FILE.py:FACTORY."
        raise InputError("model", str(path), remedy) from error
    name = path.stem if path.stem != "config" else path.parent.resolve().name
    return trace(make_trainable(model, trainable), batch, precision=precision, name=name)


def build_model(path: Path) -> nn.Module:
    """Make the model that a configuration describes, with random weights, on the current default device.

    Code that a configuration refers to is never run (``trust_remote_code``).

    Raises:
        InputError: transformers is missing, or has no such model with a loss.
        FileFormatError: the file does not describe a model.
    """
    try:
        import transformers
    except ImportError as missing:
        raise InputError("model", path, "It needs transformers: pip install transformers.") from missing
    data = read_data(path)
    if not isinstance(data, dict):
        raise FileFormatError(str(path), kind_of(data), "A configuration of transformers holds one mapping.")
    kind = str(data.get("model_type", ""))
    if kind not in transformers.CONFIG_MAPPING:
        remedy = (
            f"transformers {transformers.__version__} has no such model, and code beside the file is not run. Give the "
            "model itself: FILE.py:FACTORY."
        )
        raise InputError(f"{path}, model_type", kind or None, remedy)
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
        for name in _RANDOM_FIELDS & vars(config).keys():
            setattr(config, name, type(getattr(config, name))(0))
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
        model: nn.Module = _model_class(config, path)(config)
        return model.train()
    except InputError:
        raise
    except Exception as error:  # whatever a model's own code raises for fields that do not fit one another
        raise FileFormatError(str(path), kind, f"transformers cannot build it: {error}") from error


def _model_class(config: Any, path: Path) -> Any:
    """The class that the configuration names, or else the type's first one with a loss."""
    import transformers
    from transformers.models.auto import modeling_auto

    mappings = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in _TASKS]
    with_loss = {name for mapping in mappings for name in mapping.values()}
    of_type = (mapping[config.model_type] for mapping in mappings if config.model_type in mapping)
    named = (name for name in config.architectures or () if name in with_loss)
    model_class = next(chain(named, of_type), None)
    if model_class is None:
        remedy = "transformers computes a loss for no model of this type. Give the model itself: FILE.py:FACTORY."
        raise InputError(f"{path}, model_type", config.model_type, remedy)
    return getattr(transformers, model_class if isinstance(model_class, str) else model_class[0])


def _sequence(config: Any, sequence: int | None, path: Path) -> int:
    """Tokens a sample: as asked for, or by default as many as the model has positions."""
    text = config.get_text_config()
    names = ("max_target_positions", "max_position_embeddings", "n_positions")
    positions = next((value for name in names if (value := getattr(text, name, None))), None)
    if isinstance(positions, int) and positions > 0:
        if sequence is not None and sequence > positions:
            raise InputError("--seq", sequence, f"The model has {positions} positions ({path}): give as many at most.")
        return sequence or min(positions, LONGEST)
    return sequence or LONGEST // 8
