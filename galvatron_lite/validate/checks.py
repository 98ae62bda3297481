"""Which fields of a published run decide its cost, whether they are understood, and what is assumed for the others.

An unknown precision, recomputation or schedule leaves the run unscored; so do degrees that its model cannot be split
by. Unknown software, links and machines count as the default, which ``assumptions`` lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.cluster.catalog import known_devices, match_device
from galvatron_lite.cluster.cluster import Cluster, Device
from galvatron_lite.cluster.links import cluster_from_links, link_matching
from galvatron_lite.errors import InputError
from galvatron_lite.stacks.catalog import DEFAULT, match_stack
from galvatron_lite.validate.results import SkippedError
from galvatron_lite.validate.rows import PublishedRun

_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"gb300(?!\d)", "GB300"),
    (r"gb200(?!\d)", "GB200"),
    (r"b300(?!\d)", "B300"),
    (r"b200(?!\d)", "B200"),
    (r"h200(?!\d)", "H200"),
    (r"h100(?!\d).*96 ?gb", "H100-SXM-96GB"),
    (r"h100(?!\d).*nvl", "H100-NVL"),
    (r"h100(?!\d).*pcie", "H100-PCIE-80GB"),
    (r"h100(?!\d)", "H100-SXM5-80GB"),
    (r"h800(?!\d)", "H800-SXM5-80GB"),
    (r"a800(?!\d)", "A800-SXM4-80GB"),
    (r"a100(?!\d).*40 ?gb.*pcie|a100.*pcie.*40 ?gb", "A100-PCIE-40GB"),
    (r"a100(?!\d).*pcie", "A100-PCIE-80GB"),
    (r"a100(?!\d).*40 ?gb", "A100-SXM4-40GB"),
    (r"a100(?!\d)", "A100-SXM4-80GB"),
    (r"v100(?!\d).*16 ?gb", "V100-SXM2-16GB"),
    (r"v100(?!\d)", "V100-SXM2-32GB"),
    (r"p100(?!\d)", "P100-SXM2-16GB"),
    (r"p40", "P40"),
    (r"\bt4\b", "T4"),
    (r"rtx ?titan|titan ?rtx", "RTX-Titan"),
    (r"rtx ?8000", "Quadro-RTX-8000"),
    (r"6000 ?ada", "RTX-6000-Ada"),
    (r"a6000(?!\d)", "RTX-A6000"),
    (r"4090(?!\d)", "RTX-4090"),
    (r"3090(?!\d)", "RTX-3090"),
    (r"l40s", "L40S"),
    (r"\ba10\b", "A10"),
    (r"\ba40\b", "A40"),
)
"""Names that publications give devices, beside those of the data sheets themselves; the first that fits counts."""


def device_of(text: str | None) -> Device | None:
    """The data sheet of a device by what a publication calls it; None where there is none, or it is unknown."""
    said = (text or "").lower()
    if not said or "unknown" in said:
        return None
    exact = match_device(said)
    if exact is not None:
        return exact
    named = (name for pattern, name in _PATTERNS if re.search(pattern, said))
    return next((device for device in map(match_device, named) if device is not None), None)


def unknown_device(text: str) -> str:
    """What to say of a GPU without data sheet: names near it, or all."""
    names = {name.lower(): name for name in known_devices()}
    near = [names[name] for name in get_close_matches(text.lower(), names, 3, 0.5)]
    remedy = f"Near it: {', '.join(near)}." if near else f"Known: {', '.join(known_devices())}."
    return str(InputError("gpu", text, remedy))


def cluster_of(run: PublishedRun, calibration: Calibration) -> Cluster:
    """The cluster of a run; links that it does not state are those of the device's reference design.

    Raises:
        SkippedError: a device that is not known, or no number of them.
    """
    device = device_of(run.gpu)
    if device is None and "unknown" in (run.gpu or "unknown").lower():
        raise SkippedError("GPU not stated", f"Known: {', '.join(known_devices())}.")
    if device is None:
        raise SkippedError("no data sheet of the GPU", unknown_device(run.gpu or ""))
    if run.n_gpus is None:
        raise SkippedError("number of GPUs not stated", "Give n_gpus.")
    return cluster_from_links(
        device, run.n_gpus, run.gpus_per_node, run.intra_link, run.inter_net, run.inter_node_gbps, calibration
    )


_PRECISION = re.compile(r"(?<![a-z0-9])(?:bf16|fp16|fp32|tf32|fp8|mxfp8|fp4|nvfp4|mxfp4)(?![0-9])")
_RECOMPUTE = re.compile(r"none|selective|full|unknown|.*every [1-9]\d*(?:st|nd|rd|th)? layer")
_SCHEDULE = re.compile(r"1f1b|gpipe|interleaved|zb-?v|zb-[12]p|zb-h[12]")
_OPTIMIZER = re.compile(r"adam|sgd|momentum|rmsprop|lamb")
_MEMORY_SLACK = 0.2
"""Share by which stated and real memory may differ: GB for GiB (7 %), and what firmware and ECC keep."""

_GENERIC = {False: re.compile(r"nvlink|nvswitch|\bnvl|pci"), True: re.compile(r"infiniband|\bib\b|dgx|nvl72|nvl36")}
"""Words that mean the reference design's own link, inside a node and between nodes."""

FRAMEWORKS = (
    "Megatron-LM", "Megatron-Core", "Megatron-Bridge", "Megatron-DeepSpeed", "NeMo", "NeMo AutoModel", "MegaScale",
    "torchtitan", "torchtitan (torch.compile)", "FSDP", "llm-foundry", "Composer", "nanotron", "JAX", "Pax", "MaxText",
    "InternEvo", "LiBai", "OneFlow", "timm", "Chainer", "GPipe", "TensorFlow", "MXNet", "PaddlePaddle", "PyTorch",
    "PyTorch DDP", "DeepLearningExamples", "Galvatron",
)  # fmt: skip
"""Frameworks as people call them, all known to ``stacks/catalog.py``."""


def check_understood(run: PublishedRun) -> None:
    """Raise ``SkippedError`` where fields that decide the cost can be read, and are not understood or do not fit."""
    tensor, expert, experts = run.tp or 1, run.ep or 1, run.n_experts or 1
    words = (
        ("precision", run.precision, _PRECISION.search, "bf16, fp16, fp32, tf32, fp8, mxfp8 or nvfp4"),
        ("act_ckpt", run.act_ckpt, _RECOMPUTE.match, "none, selective, full or every Nth layer"),
        # without a pipeline its schedule decides nothing
        ("pp_schedule", run.pp_schedule if (run.pp or 1) > 1 else None, _SCHEDULE.search,
         "1f1b, gpipe, interleaved, zb-1p, zb-2p or zb-v"),
    )  # fmt: skip
    for name, value, known, choices in words:
        if value is not None and not known(value.strip().lower()):
            said = str(InputError(name, value, f"Give {choices}, or leave it out."))
            raise SkippedError("a value is not understood", said)
    degrees = (
        ("tp", tensor, bool(run.heads and run.heads % tensor), f"It must divide heads ({run.heads})."),
        ("ep", expert, expert > 1 and experts == 1, "A model without n_experts has no experts to spread."),
        ("ep", expert, experts % expert > 0, f"It must divide n_experts ({experts})."),
    )
    for name, degree, wrong, remedy in degrees:
        if wrong:
            raise SkippedError(f"does not fit: {name}", str(InputError(name, degree, remedy)))


def taken_otherwise(run: PublishedRun) -> Iterator[str]:
    """What a run states and is passed over, because it is not known or because other fields contradict it."""
    if match_stack(run.framework) is DEFAULT:
        near = get_close_matches(run.framework, FRAMEWORKS, 3, 0.5)
        hint = f" (near it: {', '.join(near)})" if near else ""
        yield f"framework {run.framework!r} is not known{hint}: priced as the default stack"
    if run.optimizer is not None and not _OPTIMIZER.search(run.optimizer.lower()):
        yield f"optimizer {run.optimizer!r} is not known: the framework's own"
    for name, between in (("intra_link", False), ("inter_net", True)):
        text = getattr(run, name)
        if text is not None and not link_is_specific(text, between):
            yield f"{name} {text!r} is not known: the reference design's"
    device, devices, node = device_of(run.gpu), run.n_gpus or 1, run.gpus_per_node or 1
    if device is not None:
        alike = [name for name in known_devices() if name.split("-")[0] == device.name.split("-")[0]]
        told = run.gpu_mem_gb is not None or re.search(r"gb|sxm|pcie|nvl", (run.gpu or "").lower())
        if len(alike) > 1 and not told:
            yield f"gpu {run.gpu!r} is one of {', '.join(alike)}: {device.name}"
        if run.gpu_mem_gb is not None and abs(run.gpu_mem_gb * 1e9 / device.memory - 1) > _MEMORY_SLACK:
            yield f"gpu_mem_gb {run.gpu_mem_gb:g} contradicts gpu {run.gpu!r}: {device.name}"
    if devices > node and devices % node:
        yield f"gpus_per_node {node} does not divide n_gpus {devices}: equal nodes as large as divide it"
    if run.grad_accum and run.micro_batch and run.global_batch:
        count = run.global_batch / ((run.dp or 1) * run.micro_batch)
        if count != run.grad_accum:
            yield f"grad_accum {run.grad_accum:g} contradicts the batch: {count:g} micro-batches"
    if run.iter_time_s is not None and run.global_batch is None:
        yield "iter_time_s without global_batch: passed over"
    if run.pp_schedule is not None and (run.pp or 1) == 1 and not _SCHEDULE.search(run.pp_schedule.lower()):
        yield f"pp_schedule {run.pp_schedule!r} without a pipeline: passed over"


def link_is_specific(text: str, between: bool) -> bool:
    """Whether a text tells the type of a link: it means the same beside any GPU, or the GPU's own link by name."""
    one, other = (link_matching(text, gpu, between=between) for gpu in ("GB300-288GB", "V100-SXM2-16GB"))
    return one == other or _GENERIC[between].search(text.lower()) is not None


_TAKEN = {
    "precision": "bf16", "act_ckpt": "none, or the least that fits",
    "zero_stage": "the framework's, or the least that fits",
    "micro_batch": "what grad_accum leaves, or 1 under a pipeline", "global_batch": "dp x micro_batch x grad_accum",
    "pp_schedule": "1F1B, or interleaved with vpp", "gpus_per_node": "8", "intra_link": "the reference design's",
    "inter_net": "the reference design's", "inter_node_gbps": "the network's adapters", "optimizer": "the framework's",
    "tied_embeddings": "tied where the MLP is not gated", "gated_mlp": "not gated",
}  # fmt: skip


def assumptions(run: PublishedRun) -> list[str]:
    """All that is taken for a run without its saying so; what it says in vain comes first."""
    devices, device = run.n_gpus or 1, device_of(run.gpu)
    language, nodes = run.seq_len is not None, devices > (run.gpus_per_node or 8)
    needed = {
        "zero_stage": (run.dp or 1) > 1, "pp_schedule": (run.pp or 1) > 1, "gpus_per_node": devices > 1,
        "intra_link": devices > 1, "inter_net": nodes, "inter_node_gbps": nodes, "tied_embeddings": language,
        "gated_mlp": language, "act_ckpt": language,
    }  # fmt: skip
    taken = [name for name in _TAKEN if getattr(run, name) is None and needed.get(name, True)]
    read = device is not None and run.gpu is not None and device.name.lower() != run.gpu.lower()
    named = [f"gpu {run.gpu!r} read as {device.name}"] if read and device is not None else []
    return [*taken_otherwise(run), *named, *(f"{name} not stated: {_TAKEN[name]}" for name in taken)]
