"""Files of plain data and tensors that can be read without running code; and the states of random generators."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.folders import Content, FileSink, write_file
from galvatron_lite.model.batch import map_tensors
from galvatron_lite.runtime.peers import of_rank_zero

_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None))


def check_plain(value: object, place: str) -> None:
    """Raise ``InputError`` for the first item that ``torch.load(weights_only=True)`` refuses, or that is a shard."""
    for path, leaf in _leaves(value, place):
        if isinstance(leaf, DTensor):
            remedy = f"{path} is this rank's part of a tensor. Save complete ones, as full_state_dict() gives them."
            raise InputError(place, type(leaf).__name__, remedy)
        if not isinstance(leaf, _PLAIN):
            remedy = (
                f"{path} is no tensor, number or text, so it could not be read again. Leave it out of state_dict()."
            )
            raise InputError(place, type(leaf).__name__, remedy)


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if type(value) in (dict, OrderedDict, Counter):
        assert isinstance(value, Mapping)
        for key, item in value.items():
            yield from ((f"{path}: a key", key), *_leaves(item, f"{path}[{key!r}]"))
    elif type(value) in (list, tuple, set):
        assert isinstance(value, (list, tuple, set))
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def alone(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU in a storage of its size, as ``torch.save`` writes complete storages."""
    host = tensor.detach().cpu()
    return host if host.untyped_storage().nbytes() == host.numel() * host.element_size() else host.clone()


def state_of(value: Any, place: str) -> Any:
    """Return the ``state_dict()`` of an object, or the value itself if it has none, as plain data on the CPU."""
    state = value.state_dict() if hasattr(value, "state_dict") else value
    check_plain(state, place)
    return map_tensors(state, alone)


def put_state(target: Any, state: Any) -> None:
    """Load a state into an object, if it has ``load_state_dict``."""
    if hasattr(target, "load_state_dict"):
        target.load_state_dict(state)


def write_plain(path: Path, content: Any) -> Content:
    """Write a new file of plain data; raise ``OSError`` if the disk is full or broken."""

    def fill(sink: FileSink) -> None:
        torch.save(content, cast("IO[bytes]", sink))

    return write_file(path, fill)


def read_plain(path: Path) -> Any:
    """Read a file of plain data, with tensors on the CPU; raise ``FileFormatError`` if it contains anything else."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files provoke all kinds of errors in torch, pickle and zipfile
        remedy = "It is not what save(folder) wrote, and is not opened in any other way. Use another checkpoint."
        raise FileFormatError("file", path, remedy) from error


def generators() -> dict[str, Any]:
    """Return the states of this process's random generators: torch on CPU and GPU, Python and numpy."""
    version, internal, following = random.getstate()
    name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": [version, list(internal), following],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
    }


def put_generators(states: Mapping[str, Any]) -> None:
    """Set the random generators of this process."""
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    version, internal, following = states["python"]
    random.setstate((version, tuple(internal), following))
    if "numpy" in states:
        name, keys, *others = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *others))


def share_generators(states: dict[str, Any], device: torch.device) -> None:
    """Replace torch's states by those of rank 0, so that all ranks draw the same numbers. All ranks call it."""
    for name in ("cpu", "cuda"):
        if states[name] is not None:
            states[name] = of_rank_zero(states[name], device)
