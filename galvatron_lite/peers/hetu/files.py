"""Read Hetu-Galvatron's profiles: computation, memory and hardware JSON of its main branch and of v2.4.0."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from galvatron_lite.errors import InputError
from galvatron_lite.files import read_data
from galvatron_lite.peers.hetu.model import (
    CollectiveTable,
    EdgeMemory,
    Engine,
    HetuHardware,
    HetuModel,
    LayerType,
    LinearTime,
)

LAYER_TIME = re.compile(r"^layertype_(\d+)_bsz(\d+)_seq(\d+)$")
EDGE_TIME = re.compile(r"^layertype_other(?:_\d+)?_bsz(\d+)_seq(\[[\d,]+\]|\d+)$")
COLLECTIVE_TIME = re.compile(r"^(allreduce|all2all)_size_(\d+)_(\d+)MB_time$")
BANDWIDTH = re.compile(r"^allreduce_size_(\d+)_consec_([01])$")
SEND_BANDWIDTH = re.compile(r"^pp_size_(\d+)$")
FIXED: dict[Engine, dict[str, float]] = {
    Engine.MAIN: {"off": 0.0, "on_first": 0.0, "on_last": 0.0},
    Engine.V240: {"off": 2 / 3, "on_first": 1.0, "on_last": 0.0},
}
"""Share of the activations of embedding and head that does not grow with the sequence, by stage."""
BATCH_POINTS = 8  # batch sizes from which its engine fits a line to the times of a layer


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a layer type that its files do not hold."""

    layers: int  # number of such layers
    hidden: int  # hidden size
    sequence: int = 0  # tokens a sample; 0: the profiled length


def read_model(
    folder: Path, sizes: Sequence[Sizes], sequence_parallel: bool = True, engine: Engine = Engine.MAIN
) -> HetuModel:
    """Read the profile of a model from its ``computation_profiling_*`` and ``memory_profiling_*`` files.

    Args:
        folder: of the two files.
        sizes: of each layer type, in order.
        sequence_parallel: which entries of the memory file to use, if it has both kinds.
        engine: whose rule to use for activations of embedding and head at lengths that were not profiled.

    Raises:
        InputError: a missing file or entry.
    """
    time_path, memory_path = (only_file(folder, f"{kind}_profiling_*.json") for kind in ("computation", "memory"))
    times, memory = _entries(time_path), _entries(memory_path)
    ends = _ending(memory, memory_path, sequence_parallel)
    types = tuple(
        _layer_type(times, memory, place, size, (time_path, memory_path), ends) for place, size in enumerate(sizes)
    )
    lengths = [kind.sequence for kind in types]
    key = str(lengths[0]) if len(lengths) == 1 else f"[{','.join(map(str, lengths))}]"
    total, first, last = (
        _edge_memory(memory, f"other_memory_pp_{part}{ends}", key, memory_path, FIXED[engine][part])
        for part in ("off", "on_first", "on_last")
    )
    _, precision, name = time_path.stem.removesuffix("_all").replace("_profiling", "").split("_", 2)
    line = _edge_line(times, types, key, time_path)
    return HetuModel(
        name, types, total, first, last, line, precision, ends == "_sp", f"{time_path.name}, {memory_path.name}"
    )


def read_hardware(folder: Path, nodes: int, gpus: int) -> HetuHardware:
    """Read the profile of a cluster from a folder of ``hardware_configs``.

    The latency tables of one node are used if there are none of several nodes: its tensor groups are within a node.
    """
    shape = f"{nodes}nodes_{gpus}gpus_per_node.json"
    reduce_path, send_path = folder / f"allreduce_bandwidth_{shape}", folder / f"p2p_bandwidth_{shape}"
    bandwidths = _figures(_entries(reduce_path), BANDWIDTH, reduce_path)
    near, far = ({int(match[1]): value for match, value in bandwidths if match[2] == flag} for flag in "10")
    send = {int(match[1]): value for match, value in _figures(_entries(send_path), SEND_BANDWIDTH, send_path)}
    overlap_path = folder / "overlap_coefficient.json"
    overlap = _number(_get(_entries(overlap_path), "overlap_coe", overlap_path), overlap_path, "overlap_coe")
    paths = [folder / f"sp_time_{shape}"]
    paths += [folder / f"sp_time_1nodes_{size}gpus_per_node.json" for size in (gpus, *range(gpus + 1, 65))]
    gather, exchange = _latencies(next((path for path in paths if path.exists()), paths[0]))
    if nodes * gpus not in near:
        field = f"{reduce_path}, allreduce_size_{nodes * gpus}_consec_1"
        raise InputError(field, None, "Profile all-reduces over all GPUs.")
    return HetuHardware(nodes, gpus, near, far, send, max(overlap, 1.0), gather, exchange, str(folder))


def _latencies(path: Path) -> tuple[dict[int, CollectiveTable], dict[int, CollectiveTable]]:
    tables: dict[str, dict[int, dict[int, float]]] = {"allreduce": {}, "all2all": {}}
    for match, value in _figures(_entries(path), COLLECTIVE_TIME, path):
        share = 0.5 if match[1] == "allreduce" else 1.0
        tables[match[1]].setdefault(int(match[2]), {})[int(match[3])] = share * value
    gather, exchange = (
        {
            ranks: CollectiveTable(points, _line(points, path, f"{name}_size_{ranks}_*MB_time"))
            for ranks, points in by.items()
        }
        for name, by in tables.items()
    )
    return gather, exchange


def _line(points: Mapping[int, float], path: Path, key: str) -> LinearTime:
    if len(points) < 2:
        raise InputError(f"{path}, {key}", len(points), "A line needs two sizes or more; profile others too.")
    slope, start = np.polyfit(np.array(list(points), dtype=float), np.array(list(points.values())), 1)
    return LinearTime(float(slope), float(start))


def only_file(folder: Path, pattern: str) -> Path:
    """The file of a folder that matches a pattern; of several, that of all layer types (``*_all``).

    Raises:
        InputError: there is none, or several match.
    """
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise InputError(str(folder), pattern, "There is no such file; give the folder of the model's configs.")
    complete = [path for path in paths if path.stem.endswith("_all")] or paths
    if len(complete) > 1:
        raise InputError(
            str(folder), pattern, f"Several match ({', '.join(path.name for path in complete)}); keep one."
        )
    return complete[0]


def _entries(path: Path) -> dict[str, Any]:
    data = read_data(path)
    if not isinstance(data, dict):
        raise InputError(str(path), type(data).__name__, "It must hold a JSON object of profiled figures.")
    return data


def _get(data: Mapping[str, Any], key: str, path: Path) -> Any:
    if key not in data:
        names = ", ".join(name for name in data if not name.startswith("layernum"))
        raise InputError(f"{path}, {key}", None, f"It holds {names[:200] or 'nothing'}. Profile it, or give its name.")
    return data[key]


def _number(value: object, path: Path, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise InputError(f"{path}, {key}", value, "It must be a number. Profile it anew.")
    return float(value)


def _figures(data: Mapping[str, Any], pattern: re.Pattern[str], path: Path) -> list[tuple[re.Match[str], float]]:
    """The entries whose keys match a pattern."""
    matches = ((pattern.match(key), value) for key, value in data.items())
    return [(match, _number(value, path, match[0])) for match, value in matches if match]


def _ending(memory: Mapping[str, Any], path: Path, sequence_parallel: bool) -> str:
    """The ending of the memory file's keys: ``_sp`` for sequence parallelism."""
    endings = [ending for ending in ("_sp", "") if f"layertype_0{ending}" in memory]
    if not endings:
        raise InputError(f"{path}, layertype_0_sp", None, "It holds no layer's memory. Run its memory profiler.")
    preferred = "_sp" if sequence_parallel else ""
    return preferred if preferred in endings else endings[0]


def _layer_type(
    times: Mapping[str, Any],
    memory: Mapping[str, Any],
    place: int,
    size: Sizes,
    paths: tuple[Path, Path],
    ends: str,
) -> LayerType:
    time_path, memory_path = paths
    figures = _figures(times, LAYER_TIME, time_path)
    layer_times = {(int(match[2]), int(match[3])): value for match, value in figures if int(match[1]) == place}
    if not layer_times:
        raise InputError(
            f"{time_path}, layertype_{place}_bsz*", None, "Profile that layer type, or give fewer --layers."
        )
    sequence = size.sequence or min(length for _, length in layer_times)
    forward = _time_line(layer_times, sequence, time_path, f"layertype_{place}")
    name = f"layertype_{place}{ends}"
    by_length = _get(memory, name, memory_path)
    held, scale = _at_length(by_length, str(sequence), memory_path, scales=len(by_length) > 1)
    first = _get(by_length, min(by_length, key=int), memory_path) if scale != 1.0 else held
    activation = _get(held, "tp_activation_per_bsz_dict", memory_path)
    checkpoint = _number(_get(activation, "checkpoint", memory_path), memory_path, f"{name}.checkpoint")
    degrees = {
        int(key): scale * _number(value, memory_path, f"{name}.{key}")
        for key, value in activation.items()
        if key.isdigit()
    }
    parameters = _number(_get(first, "parameter_size", memory_path), memory_path, f"{name}.parameter_size")
    return LayerType(size.layers, size.hidden, sequence, parameters, degrees, scale * checkpoint, forward)


def _at_length(by_length: Mapping[str, Any], key: str, path: Path, scales: bool) -> tuple[Any, float]:
    """Figures at a sequence length, and a factor on them: profiled, or of the longest length in proportion."""
    if not scales:
        return _get(by_length, key, path), 1.0
    longest = max(by_length, key=int)
    return _get(by_length, longest, path), int(key) / int(longest)


def _time_line(times: Mapping[tuple[int, int], float], sequence: int, path: Path, name: str) -> LinearTime:
    """Milliseconds by samples: a line through batches, a parabola through lengths, or one point, as in its engine."""
    batches = {batch: time * batch for (batch, length), time in times.items() if length == sequence}
    lengths = {length: time for (batch, length), time in times.items() if batch == 1}
    if len(batches) >= BATCH_POINTS:
        return _line(batches, path, f"{name}_bsz*_seq{sequence}")
    if len(lengths) > 2:
        figures = np.array(list(lengths), dtype=float), np.array(list(lengths.values()))
        return LinearTime(float(np.polyval(np.polyfit(*figures, 2 if "other" not in name else 1), sequence)))
    if not batches:
        profiled = ", ".join(str(length) for length in sorted({length for _, length in times}))
        remedy = f"Lengths profiled: {profiled}. Give one as --seq."
        raise InputError(f"{path}, {name}_bsz*_seq{sequence}", None, remedy)
    most = max(batches)
    return LinearTime(batches[most] / most)


def _edge_line(times: Mapping[str, Any], types: Sequence[LayerType], key: str, path: Path) -> LinearTime:
    figures = _figures(times, EDGE_TIME, path)
    if len(types) > 1:
        edge_times = {(int(match[1]), 0): value for match, value in figures if match[2] == key}
        if edge_times:
            return _time_line(edge_times, 0, path, "layertype_other")
    edge_times = {(int(match[1]), int(match[2])): value for match, value in figures if match[2].isdigit()}
    if not edge_times:
        raise InputError(f"{path}, layertype_other_bsz*_seq{key}", None, "Profile embedding and head too.")
    return _time_line(edge_times, types[0].sequence, path, "layertype_other")


def _edge_memory(memory: Mapping[str, Any], name: str, key: str, path: Path, fixed: float) -> EdgeMemory:
    """Memory of embedding and head; ``fixed``: the share of activations that does not grow with the sequence."""
    by_length = _get(memory, name, path)
    scales = key.isdigit() and (len(by_length) > 1 or key not in by_length)
    figures, scale = _at_length(by_length, key, path, scales)
    parts = [_get(figures, part, path) for part in ("model_states", "activation")]
    states, activation = (
        {int(degree): _number(value, path, f"{name}.{degree}") for degree, value in part.items()} for part in parts
    )
    share = fixed + (1.0 - fixed) * scale
    return EdgeMemory(states, {degree: share * value for degree, value in activation.items()})
