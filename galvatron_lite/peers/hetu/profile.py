"""Convert Hetu-Galvatron's profiles to ours, so that our planner uses the same measurements.

Its bandwidths are bus bandwidths: it divides MB (2^20 bytes) by GB/s and takes the quotient as milliseconds. An
all-reduce of S bytes over n ranks takes 2 (n - 1) / n S / B. Gathers and scatters of tensor groups come from tables of
neighbouring ranks, all other collectives from the bus bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from galvatron_lite.cluster.cluster import Cluster, Collective, Device, DeviceGroup, Level
from galvatron_lite.errors import InputError
from galvatron_lite.files import read_data
from galvatron_lite.model.graph import Role
from galvatron_lite.peers.hetu.files import LAYER_TIME, Sizes, only_file, read_hardware, read_model
from galvatron_lite.peers.hetu.model import (
    BIAS,
    CONTEXT_MB,
    CollectiveTable,
    Engine,
    HetuHardware,
    HetuModel,
    to_graph,
    to_points,
)
from galvatron_lite.profiler.schema import (
    PROFILE_VERSION,
    CollectiveFit,
    CollectivePoint,
    OptimizerCost,
    Origin,
    OriginKind,
    Overlap,
    Profile,
)
from galvatron_lite.units import ITEM_BYTES

MB = 2**20
PER_MS = MB * 1000  # 1 MB a millisecond in bytes a second
EXCHANGES = 2
"""All-to-alls of the whole boundary tensor in one forward pass, by its formulas."""


def to_cluster(hardware: HetuHardware, precision: str, memory: int) -> Cluster:
    """The cluster; its files only have the numbers of nodes and GPUs."""
    device = Device("gpu", memory, 1.0, {precision: 1.0}, context=CONTEXT_MB * MB, source=hardware.source)
    levels = [Level("node", hardware.gpus, hardware.near[hardware.gpus] * PER_MS, 0.0, source="measured")]
    if hardware.nodes > 1:
        bandwidth = hardware.near[hardware.devices] * PER_MS
        levels.append(Level("cluster", hardware.nodes, bandwidth, 0.0, source="measured"))
    name = f"{hardware.nodes}x{hardware.gpus}"
    return Cluster(name, (DeviceGroup(device, hardware.devices),), tuple(levels), {"profiled-by": "Hetu-Galvatron"})


def _groups(hardware: HetuHardware) -> Iterator[tuple[int, int]]:
    """Numbers of ranks and strides of all groups, in powers of two."""
    powers = [2**power for power in range(hardware.devices.bit_length())]
    yield from ((ranks, stride) for ranks in powers[1:] for stride in powers if ranks * stride <= hardware.devices)


def _tables(hardware: HetuHardware, ranks: int) -> Iterator[tuple[Collective, CollectiveTable, float, float]]:
    """Collectives with their table, and factors on its sizes and times for one of our calls.

    Its formulas look up all-to-alls by the whole boundary tensor and count two a pass; ours are four a pass, of the
    tensor on one rank.
    """
    if ranks in hardware.gather:
        yield Collective.ALL_GATHER, hardware.gather[ranks], 1.0, 1.0
        yield Collective.REDUCE_SCATTER, hardware.gather[ranks], 1.0, 1.0
    if ranks in hardware.exchange:
        yield Collective.ALL_TO_ALL, hardware.exchange[ranks], 1 / ranks, EXCHANGES / 4


def _points(hardware: HetuHardware) -> Iterator[CollectivePoint]:
    for ranks in (ranks for ranks, stride in _groups(hardware) if stride == 1):
        for kind, table, share, scale in _tables(hardware, ranks):
            for size, milliseconds in sorted(table.points.items()):
                seconds, siblings = milliseconds / 1000 * scale, hardware.devices // ranks
                yield CollectivePoint(kind, ranks, 1, siblings, round(size * MB * share), seconds)


def _fits(hardware: HetuHardware, ranks: int, stride: int) -> Iterator[CollectiveFit]:
    siblings = hardware.devices // ranks
    bus = PER_MS / hardware.ms_per_mb(ranks, apart=stride > 1)
    rounds = ranks / (ranks - 1)
    yield CollectiveFit(Collective.ALL_REDUCE, ranks, stride, siblings, 0.0, bus * rounds / 2, 0.0)
    fits = (
        {kind: (table, share, scale) for kind, table, share, scale in _tables(hardware, ranks)} if stride == 1 else {}
    )
    for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL):
        if kind in fits:
            table, share, scale = fits[kind]
            latency, speed = max(table.line.start, 0.0) / 1000 * scale, PER_MS * share / (table.line.slope * scale)
            yield CollectiveFit(kind, ranks, 1, siblings, latency, speed, 0.0)
        else:
            yield CollectiveFit(kind, ranks, stride, siblings, 0.0, bus * rounds, 0.0)
    if ranks == 2:
        speed = hardware.send.get(hardware.devices // stride, min(hardware.send.values()))
        yield CollectiveFit(Collective.SEND_RECV, 2, stride, siblings, 0.0, speed * PER_MS, 0.0)


DEVICE_MEMORY = 80 * 2**30
"""Bytes of a device, by default those of the GPUs of its shipped profiles."""
HIDDEN = {"tensor-async": 1.0, "zero.forward": 0.0}
"""Exceptions from what compute hides by default: gradients of inputs hide communication; in its formulas the first
gather of ZeRO-3 is not hidden."""


def to_profile(
    model: HetuModel,
    hardware: HetuHardware,
    engine: Engine = Engine.MAIN,
    memory: int = DEVICE_MEMORY,
) -> Profile:
    """Convert its profiles of a model and a cluster.

    Args:
        model: profile of the model.
        hardware: profile of the cluster.
        engine: whose communication counts to use.
        memory: bytes of one device, which its files do not have.
    """
    compute = ITEM_BYTES[model.precision]
    origin = Origin(OriginKind.MEASURED, f"Hetu-Galvatron ({engine.value}): {model.source}")
    return Profile(
        version=PROFILE_VERSION,
        name=f"{model.name}-hetu",
        graph=to_graph(model, engine),
        cluster=to_cluster(hardware, model.precision, memory),
        origin=origin,
        communication_origin=Origin(OriginKind.MEASURED, f"Hetu-Galvatron ({engine.value}): {hardware.source}"),
        layers=to_points(model),
        optimizer=OptimizerCost("adam", 16 - 2 * compute, 0.0),
        collectives=tuple(_points(hardware)),
        fits=tuple(fit for ranks, stride in _groups(hardware) for fit in _fits(hardware, ranks, stride)),
        overlap=Overlap(hardware.overlap, hardware.overlap),
        hidden=dict(HIDDEN),
        gather_precision=model.precision,
        reduce_precision=model.precision,
        parameter_precision=model.precision,
        accumulates=True,
        shard_share=BIAS,
    )


def import_profile(
    folder: Path,
    sizes: Sequence[Sizes],
    nodes: int,
    gpus: int,
    hardware: Path | None = None,
    engine: Engine = Engine.MAIN,
    memory: int = DEVICE_MEMORY,
) -> Profile:
    """Read and convert its profiles; see ``read_model``, ``read_hardware`` and ``to_profile``.

    Args:
        hardware: folder of the hardware profile; by default one beside or in ``folder``.
    """
    if hardware is None:
        folders = (folder, folder / "hardware", folder.parent / "hardware", folder.parent / "hardware_configs")
        hardware = next((place for place in folders if any(place.glob("allreduce_bandwidth_*.json"))), folder)
    model = read_model(folder, sizes, engine=engine)
    return to_profile(model, read_hardware(hardware, nodes, gpus), engine, memory)


ASK = "Give --layers and --hidden, one number for each layer type, joined by commas (24,24)."
WHERE = (
    "They are in the model's configuration, for each part in turn (encoder, decoder; stages of pictures): "
    "num_layers or depths, and hidden_size or d_model (doubled in every next stage of a Swin)."
)


def sizes_for(folder: Path, layers: str = "", hidden: str = "", sequence: str = "") -> list[Sizes]:
    """The sizes of each layer type that ``import_profile`` needs.

    Args:
        folder: of the profile; without layers and hidden its name is looked up among our models.
        layers: numbers of layers joined by commas, one for each layer type.
        hidden: hidden sizes, in the same way.
        sequence: sequence lengths, in the same way; by default the profiled length.

    Raises:
        InputError: numbers that cannot be read or do not match, or an unknown model.
    """
    lengths = _numbers(sequence, "--seq") if sequence else []
    if not layers and not hidden:
        layer_types = _layer_types(folder)
        return [Sizes(count, wide, lengths[place] if place < len(lengths) else 0)
                for place, (count, wide) in enumerate(layer_types)]  # fmt: skip
    counts, widths = _numbers(layers, "--layers"), _numbers(hidden, "--hidden")
    lengths = lengths or [0] * len(counts)
    for option, numbers in (("--hidden", widths), ("--seq", lengths)):
        if len(numbers) != len(counts):
            raise InputError(option, ",".join(map(str, numbers)), f"--layers has {len(counts)} layer types.")
    return [Sizes(*sizes) for sizes in zip(counts, widths, lengths, strict=True)]


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise InputError(option, text or None, ASK)
    return numbers


def _layer_types(folder: Path) -> list[tuple[int, int]]:
    """(layers, hidden) of each layer type of our model with the name of the profile."""
    from galvatron_lite.model.shapes import load_model

    path = only_file(folder, "computation_profiling_*.json")
    name = path.stem.removeprefix("computation_profiling_").split("_", 1)[-1].removesuffix("_all")
    try:
        graph = load_model(name.lower())
    except InputError:
        raise InputError("model", name, f"It is none of the shipped ones. {ASK} {WHERE}") from None
    blocks = [layer.kind for layer in graph.layers if layer.role is Role.BLOCK]
    types = [(len(list(same)), graph.kinds[kind].dims.hidden) for kind, same in groupby(blocks)]
    matches = (LAYER_TIME.match(key) for key in read_data(path))
    profiled = len({match[1] for match in matches if match})
    if len(types) != profiled:
        raise InputError("model", name, f"The profile has {profiled} layer types, ours {len(types)}. {ASK} {WHERE}")
    return types
