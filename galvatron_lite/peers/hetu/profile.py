"""Hetu-Galvatron's profiles as ours, so that our planner plans on the very same measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from galvatron_lite.peers.hetu.files import Sizes, read_hardware, read_model
from galvatron_lite.peers.hetu.layers import to_graph, to_points
from galvatron_lite.peers.hetu.links import to_cluster, to_collectives, to_fits
from galvatron_lite.peers.hetu.model import BIAS, Engine, HetuHardware, HetuModel
from galvatron_lite.profiler.schema import PROFILE_VERSION, OptimizerCost, Origin, OriginKind, Overlap, Profile
from galvatron_lite.units import ITEM_BYTES

DEVICE_MEMORY = 80 * 2**30
"""Bytes of a device where nobody says: the GPUs its shipped profiles were made on."""
HIDDEN = {"tensor-async": 1.0, "zero.forward": 0.0}
"""What compute hides beyond what its dimension says: gradients of inputs do; ZeRO-3's first gather, in its formulas,
does not."""


def to_profile(
    model: HetuModel,
    hardware: HetuHardware,
    engine: Engine = Engine.MAIN,
    memory: int = DEVICE_MEMORY,
    async_reduce: bool = True,
    unbuffered: bool = False,
    single: bool = False,
) -> Profile:
    """Our profile of what it measured.

    Args:
        model, hardware: its profiles.
        engine: whose communication counts are carried over.
        memory: bytes of one device, which its files do not say.
        async_reduce: whether gradients are summed behind the last micro-batch only (its ``async_grad_reduce``).
        unbuffered: whether what ZeRO gathers and stages send need no memory, as in its formulas.
        single: whether embedding and head take what was measured of them in one stage, instead of in stages apart.
    """
    compute = ITEM_BYTES[model.precision]
    origin = Origin(OriginKind.MEASURED, f"Hetu-Galvatron ({engine.value}): {model.source}")
    return Profile(
        version=PROFILE_VERSION,
        name=f"{model.name}-hetu",
        graph=to_graph(model, engine, single=single),
        cluster=to_cluster(hardware, model.precision, memory),
        origin=origin,
        communication_origin=Origin(OriginKind.MEASURED, f"Hetu-Galvatron ({engine.value}): {hardware.source}"),
        layers=to_points(model, single=single),
        optimizer=OptimizerCost("adam", 16 - 2 * compute, 0.0),
        collectives=to_collectives(hardware),
        fits=to_fits(hardware),
        overlap=Overlap(hardware.overlap, hardware.overlap),
        hidden=dict(HIDDEN),
        gather_precision=model.precision,
        reduce_precision=model.precision,
        parameter_precision=model.precision,
        accumulates=async_reduce,
        shard_share=BIAS,
        unbuffered=unbuffered,
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
    """Our profile from its files.

    Args:
        folder: of the model's computation and memory profile.
        sizes: of its layer types.
        nodes, gpus: nodes and GPUs of each.
        hardware: folder of the hardware profile; the model's or the one beside it called ``hardware`` or
            ``hardware_configs`` if not given.
        engine: whose communication counts.
        memory: bytes of one device.

    Raises:
        InputError: a file or key that is missing or not a number.
    """
    places = (folder, folder / "hardware", folder.parent / "hardware", folder.parent / "hardware_configs")
    found = hardware or next((place for place in places if any(place.glob("allreduce_bandwidth_*.json"))), folder)
    model = read_model(folder, sizes, engine=engine)
    return to_profile(model, read_hardware(found, nodes, gpus), engine, memory)
