"""Files of tensors in the safetensors format: a JSON header, then the items of each tensor.

Source of the format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import check_regular, without_twins
from galvatron_lite.folders import Content, FileSink, write_file

CODES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
_CODE_OF = {dtype: code for code, dtype in CODES.items()}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT, _LARGEST_HEADER = 8, 100_000_000
_META = "__metadata__"


@dataclass(frozen=True, slots=True)
class FileRange:
    """The range of a tensor in a file: bytes [start, stop) after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Content:
    """Write a new file of tensors on any device; raise ``InputError`` for a dtype that the format does not have."""
    # widest items first, so that each tensor is aligned to its item size
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {_META: {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        code = _CODE_OF.get(tensor.dtype)
        if code is None:
            raise InputError("dtype", tensor.dtype, f"{name} cannot be kept: use one of {', '.join(CODES)}.")
        stop = offset + tensor.nbytes
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)

    def fill(sink: FileSink) -> None:
        sink.write(_LENGTH.pack(len(text)) + text)
        for _, tensor in ordered:
            if tensor.numel():
                flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                sink.write(memoryview(flat))

    return write_file(path, fill)


class TensorFile:
    """A file of tensors, mapped into memory, so that items are read when they are used.

    Attributes:
        places: ranges of its tensors, by name.
    """

    def __init__(self, path: Path) -> None:
        self._path = check_regular(path)
        try:
            with path.open("rb") as stream:
                # copy on write, as torch only accepts writable memory
                self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise FileFormatError("file", path, f"It cannot be read ({error}). Use another checkpoint.") from error
        self._start, header = self._header()
        self.places = {name: self._place(name, entry) for name, entry in header.items() if name != _META}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor by name; raise ``FileFormatError`` if the file does not contain it."""
        place = self.places.get(name)
        if place is None:
            raise FileFormatError("file", self._path, f"It holds no {name!r}. Use another checkpoint.")
        count = prod(place.shape)
        if not count:
            return torch.empty(place.shape, dtype=place.dtype)
        offset = self._start + place.start
        return torch.frombuffer(self._bytes, dtype=place.dtype, count=count, offset=offset).reshape(place.shape)

    def _header(self) -> tuple[int, dict[str, Any]]:
        try:
            (length,) = _LENGTH.unpack(self._bytes[: _LENGTH.size])
            start = _LENGTH.size + length
            if length > _LARGEST_HEADER or start > len(self._bytes):
                raise ValueError("its header is longer than the file")
            header = json.loads(self._bytes[_LENGTH.size : start], object_pairs_hook=without_twins)
        except (ValueError, struct.error, RecursionError) as error:
            raise self._error(str(error)) from error
        if not isinstance(header, dict):
            raise self._error("its header is no mapping")
        return start, header

    def _place(self, name: str, entry: Any) -> FileRange:
        try:
            dtype, shape = CODES[entry["dtype"]], tuple(entry["shape"])
            start, stop = entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._error(f"{name!r} is not described") from error
        valid = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
        if not valid or stop - start != prod(shape) * dtype.itemsize or self._start + stop > len(self._bytes):
            raise self._error(f"{name!r} is not where its header says")
        return FileRange(dtype, shape, start, stop)

    def _error(self, reason: str) -> FileFormatError:
        remedy = f"It is no complete file of tensors ({reason}). Use another checkpoint."
        return FileFormatError("file", self._path, remedy)
