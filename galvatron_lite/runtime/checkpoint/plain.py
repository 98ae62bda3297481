"""Files of plain data and tensors that can be read again without running anything; random generators."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import numpy
import torch
from torch import Tensor

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.folders import Content, FileSink, write_file

_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None))


def check_plain(value: object, place: str) -> None:
    """Refuse what ``torch.load(weights_only=True)`` would.

    Raises:
        InputError: names the first item that is neither a tensor, a number, a text nor a collection of them.
    """
    for path, found in _leaves(value, place):
        if not isinstance(found, _PLAIN):
            remedy = (
                f"{path} is no tensor, number or text, so it could not be read again. Leave it out of state_dict()."
            )
            raise InputError(place, type(found).__name__, remedy)


def alone(tensor: Tensor) -> Tensor:
    """On the CPU, with no more storage than it needs: a storage is written whole."""
    there = tensor.detach().cpu()
    return there if there.untyped_storage().nbytes() == there.numel() * there.element_size() else there.clone()


def write_plain(path: Path, content: Any) -> Content:
    """Write a new file of plain data.

    Raises:
        OSError: the disk is full, or broken.
    """

    def fill(sink: FileSink) -> None:
        torch.save(content, cast("IO[bytes]", sink))

    return write_file(path, fill)


def read_plain(path: Path, lazily: bool = False) -> Any:
    """What a file holds, on the CPU; ``lazily``: tensors are read from it when they are used.

    Raises:
        FileFormatError: it is no such file, or holds what would have to be run.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=lazily)
    except Exception as error:  # of torch, pickle or zipfile: whatever a file provokes
        remedy = "It is not what save(folder) wrote, and is not opened in any other way. Use another checkpoint."
        raise FileFormatError("file", path, remedy) from error


def generators() -> dict[str, Any]:
    """The states of this process's random generators: torch's of the CPU and of its GPU, Python's, numpy's."""
    version, internal, following = random.getstate()
    name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": [version, list(internal), following],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
    }


def put_generators(kept: Mapping[str, Any]) -> None:
    """Set this process's random generators."""
    torch.set_rng_state(kept["cpu"])
    if kept["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(kept["cuda"])
    version, internal, following = kept["python"]
    random.setstate((version, tuple(internal), following))
    if "numpy" in kept:
        name, keys, *others = kept["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *others))


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if type(value) in (dict, OrderedDict, Counter):
        assert isinstance(value, Mapping)
        for key, item in value.items():
            yield from ((f"{path}: a key", key), *_leaves(item, f"{path}[{key!r}]"))
    elif type(value) in (list, tuple, set):
        assert isinstance(value, (list, tuple, set))
        for place, item in enumerate(value):
            yield from _leaves(item, f"{path}[{place}]")
    else:
        yield path, value
