"""Checks the fields of a published run, lists what is assumed for absent ones, and reads its device and software.

An unknown precision, recomputation or schedule leaves the run unscored; so do degrees that its model cannot be split
by. Unknown software, links and machines count as the default, which ``assumptions`` lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.calibration.store import constants_for_stack
from galvatron_lite.cluster.catalog import known_devices, match_device
from galvatron_lite.cluster.cluster import Cluster, Device
from galvatron_lite.cluster.links import cluster_from_links, link_matching, publication_patterns
from galvatron_lite.errors import InputError
from galvatron_lite.model.kernels import Kernels
from galvatron_lite.stacks.catalog import DEFAULT, match_stack
from galvatron_lite.stacks.schema import Stack, StateLayout
from galvatron_lite.units import ITEM_BYTES
from galvatron_lite.validate.plans import gathers_once, integer_argument
from galvatron_lite.validate.results import SkipError
from galvatron_lite.validate.rows import PublishedRun


def device_of(text: str | None) -> Device | None:
    """Return the data sheet of a device by a publication's name for it; None if it is unknown."""
    words = (text or "").lower()
    if not words or "unknown" in words:
        return None
    exact = match_device(words)
    if exact is not None:
        return exact
    names = (name for pattern, name in publication_patterns()["devices"] if re.search(pattern, words))
    return next((device for device in map(match_device, names) if device is not None), None)


def unknown_device(text: str) -> str:
    """Return the message for a GPU without data sheet: similar names, or all."""
    names = {name.lower(): name for name in known_devices()}
    near = [names[name] for name in get_close_matches(text.lower(), names, 3, 0.5)]
    remedy = f"Near it: {', '.join(near)}." if near else f"Known: {', '.join(known_devices())}."
    return str(InputError("gpu", text, remedy))


def cluster_of(run: PublishedRun, calibration: Calibration) -> Cluster:
    """Return the cluster of a run; links that it does not state are those of the device's reference design.

    Raises:
        SkipError: an unknown device, or no number of devices.
    """
    device = device_of(run.gpu)
    if device is None and "unknown" in (run.gpu or "unknown").lower():
        raise SkipError("GPU not stated", f"Known: {', '.join(known_devices())}.")
    if device is None:
        raise SkipError("no data sheet of the GPU", unknown_device(run.gpu or ""))
    if run.n_gpus is None:
        raise SkipError("number of GPUs not stated", "Give n_gpus.")
    return cluster_from_links(
        device, run.n_gpus, run.gpus_per_node, run.intra_link, run.inter_net, run.inter_node_gbps, calibration
    )


_PRECISION = re.compile(r"(?<![a-z0-9])(?:bf16|fp16|fp32|tf32|fp8|mxfp8|fp4|nvfp4|mxfp4)(?![0-9])")
_RECOMPUTE = re.compile(r"none|selective|full|unknown|.*every [1-9]\d*(?:st|nd|rd|th)? layer")
_SCHEDULE = re.compile(r"1f1b|gpipe|interleaved|zb-?v|zb-[12]p|zb-h[12]")
_OPTIMIZER = re.compile(r"adam|sgd|momentum|rmsprop|lamb|lars|nag|nesterov")
_MEMORY_SLACK = 0.2
"""Share by which stated and real memory may differ: GB for GiB (7 %), and memory reserved by firmware and ECC."""

_GENERIC = {False: re.compile(r"nvlink|nvswitch|\bnvl|pci"), True: re.compile(r"infiniband|\bib\b|dgx|nvl72|nvl36")}
"""Words for the link of the reference design, inside a node and between nodes."""

FRAMEWORKS = (
    "Megatron-LM", "Megatron-Core", "Megatron-Bridge", "Megatron-DeepSpeed", "NeMo", "NeMo AutoModel", "MegaScale",
    "torchtitan", "torchtitan (torch.compile)", "FSDP", "llm-foundry", "Composer", "nanotron", "JAX", "Pax", "MaxText",
    "InternEvo", "LiBai", "OneFlow", "timm", "Chainer", "GPipe", "TensorFlow", "MXNet", "PaddlePaddle", "PyTorch",
    "PyTorch DDP", "DeepLearningExamples", "Galvatron",
)  # fmt: skip
"""Common names of frameworks, all known to ``configs/stacks``."""


def check_understood(run: PublishedRun) -> None:
    """Refuse values that decide the cost and are unknown or do not fit one another.

    Raises:
        SkipError: names the field, its value and the remedy.
    """
    tensor, expert, experts = run.tp or 1, run.ep or 1, run.n_experts or 1
    words = (
        ("precision", run.precision, _PRECISION.search, "bf16, fp16, fp32, tf32, fp8, mxfp8 or nvfp4"),
        ("act_ckpt", run.act_ckpt, _RECOMPUTE.match, "none, selective, full or every Nth layer"),
        # without a pipeline its schedule decides nothing
        ("pp_schedule", run.pp_schedule if (run.pp or 1) > 1 else None, _SCHEDULE.search,
         "1f1b, gpipe, interleaved, zb-1p, zb-2p or zb-v"),
    )  # fmt: skip
    for name, value, understood, choices in words:
        if value is not None and not understood(value.strip().lower()):
            message = str(InputError(name, value, f"Give {choices}, or leave it out."))
            raise SkipError("a value is not understood", message)
    degrees = (
        ("tp", tensor, bool(run.heads and run.heads % tensor), f"It must divide heads ({run.heads})."),
        ("ep", expert, expert > 1 and experts == 1, "A model without n_experts has no experts to spread."),
        ("ep", expert, experts % expert > 0, f"It must divide n_experts ({experts})."),
    )
    for name, degree, wrong, remedy in degrees:
        if wrong:
            raise SkipError(f"does not fit: {name}", str(InputError(name, degree, remedy)))


def taken_otherwise(run: PublishedRun) -> Iterator[str]:
    """Yield a line for each field that is ignored because its value is unknown or other fields contradict it."""
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
        specific = run.gpu_mem_gb is not None or re.search(r"gb|sxm|pcie|nvl", (run.gpu or "").lower())
        if len(alike) > 1 and not specific:
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
    """Whether a text determines the type of a link, for any GPU or by a generic name of the GPU's link."""
    newest, oldest = (link_matching(text, gpu, between=between) for gpu in ("GB300-288GB", "V100-SXM2-16GB"))
    return newest == oldest or _GENERIC[between].search(text.lower()) is not None


_DEFAULTS = {
    "precision": "bf16", "act_ckpt": "none, or the least that fits",
    "zero_stage": "the framework's, or the least that fits",
    "micro_batch": "what grad_accum leaves, or 1 under a pipeline", "global_batch": "dp x micro_batch x grad_accum",
    "pp_schedule": "1F1B, or interleaved with vpp", "gpus_per_node": "8", "intra_link": "the reference design's",
    "inter_net": "the reference design's", "inter_node_gbps": "the network's adapters", "optimizer": "the framework's",
    "tied_embeddings": "tied where the MLP is not gated", "gated_mlp": "not gated",
}  # fmt: skip


def assumptions(run: PublishedRun) -> list[str]:
    """Return a line for each ignored field, then for each field that a run does not state and the cost depends on."""
    devices, device = run.n_gpus or 1, device_of(run.gpu)
    language, nodes = run.seq_len is not None, devices > (run.gpus_per_node or 8)
    needed = {
        "zero_stage": (run.dp or 1) > 1, "pp_schedule": (run.pp or 1) > 1, "gpus_per_node": devices > 1,
        "intra_link": devices > 1, "inter_net": nodes, "inter_node_gbps": nodes, "tied_embeddings": language,
        "gated_mlp": language, "act_ckpt": language,
    }  # fmt: skip
    unstated = [name for name in _DEFAULTS if getattr(run, name) is None and needed.get(name, True)]
    lines = list(taken_otherwise(run))
    if device is not None and run.gpu is not None and device.name.lower() != run.gpu.lower():
        lines.append(f"gpu {run.gpu!r} read as {device.name}")
    return [*lines, *(f"{name} not stated: {_DEFAULTS[name]}" for name in unstated)]


_OPTIMIZERS = (
    ("lars", "lars"),
    ("momentum", "sgd"),
    ("nag", "sgd"),
    ("nesterov", "sgd"),
    ("rmsprop", "sgd"),  # also one state for each item
    ("sgd", "sgd-plain"),
    ("lamb", "lamb"),
    ("decoupled", "adamw-loop"),
    ("fused", "adamw-fused"),
)
"""Implementations of optimizers by words; the stack's default if none fits. Composer's decoupled AdamW updates tensors
one by one (github.com/mosaicml/composer, composer/optim/decoupled_weight_decay.py)."""

_ASYNC_TENSOR = {"tensor": 0.2, "tensor-async": 0.2}
"""[Empirical] share of gathers and scatters that PyTorch's asynchronous tensor parallelism hides, net of slower small
matmuls: gathers run piece by piece beside the matmuls that produce or consume them, and no copy into the order of
tokens follows (discuss.pytorch.org/t/209487: in all a tenth of the step of Llama 3 8B and 70B)."""

_HIDDEN_EXPERTS = 0.8
"""[Empirical] share of the exchange of tokens that Megatron-Core's ``--overlap-moe-expert-parallel-comm`` hides:
forward of one micro-batch runs beside backward of another (arXiv 2412.19437, section 3.2.1: DualPipe hides nearly all).
"""

_SHARDED = {"zero": 0.9}
"""[Empirical] share that Megatron-FSDP hides: like PyTorch's FSDP it prefetches parameters and reduces gradients beside
compute, whatever the options of Megatron-LM's data parallelism say (Megatron-Core's user guide, "Megatron FSDP")."""

_UNIQUE_DISPATCH = ("deepep", "hybridep")
"""Dispatchers that send a token only once to each rank and node (github.com/deepseek-ai/DeepEP)."""


def stack_of(run: PublishedRun, precision: str, calibration: Calibration) -> Stack:
    """Return the run's framework with the kernels, precision of states and optimizer that the run states.

    Variants of the constants change the stack's name, which is a key of cached prices.
    """
    stack = match_stack(run.framework)
    optimizer, overlapped = optimizer_of(run.optimizer, stack), "asynctp" in (run.precision or "").lower()
    # Megatron-LM's distributed optimizer is stage 1: what shards parameters is Megatron-FSDP.
    megatron = stack.name in ("megatron-lm", "megatron-ci", "megatron-core", "megatron-bridge")
    variants = {
        "async tensor": _ASYNC_TENSOR if overlapped else {},
        "expert overlap": {"expert": _HIDDEN_EXPERTS} if "a2a overlap" in run.remarks else {},
        "sharded": _SHARDED if megatron and (run.zero_stage or 0) > 1 else {},
    }
    constants = constants_for_stack(calibration, stack.name)
    for hidden in variants.values():
        constants = replace(constants, hidden={**constants.hidden, **hidden})
    return replace(
        stack,
        name=", ".join((stack.name, *(name for name, hidden in variants.items() if hidden))),
        kernels=_kernels(run, stack, precision),
        copies_gathered=stack.copies_gathered and not overlapped,
        states=_states(run, stack, precision, optimizer),
        optimizer=optimizer,
        constants=constants,
    )


def optimizer_of(text: str | None, stack: Stack) -> str:
    """Return the optimizer's implementation by a run's name for it."""
    words = (text or "").lower()
    return next((name for word, name in _OPTIMIZERS if word in words), stack.optimizer)


def _kernels(run: PublishedRun, stack: Stack, precision: str) -> Kernels:
    """Return the kernels that a run states: attention, compilation, recomputation, loss; fp32 needs no casts.

    The modules a run names tell what selective recomputation runs again, the argument ``--cross-entropy-loss-fusion``
    tells Megatron-LM's fused cross-entropy (native, or Transformer Engine's). torchtitan compiles its loss since it has
    ``float8.force_recompute_fp8_weight_in_bwd`` (2025). NVIDIA's BERT is scripted, which fuses scale and mask, where it
    is pretrained (DeepLearningExamples, run_pretraining.py), not in run_squad.py.
    """
    kernels = stack.kernels
    if run.flash_attn is not None:
        kernels = replace(kernels, flash_attention=run.flash_attn)
    if "torch.compile" in run.framework.lower() and not kernels.compiled:
        kernels = replace(kernels, compiled=True, compiled_loss=True)
    if _is_fp32(precision):
        kernels = replace(kernels, autocast=False)
    if stack.scripted and run.arch in ("encoder", "bert") and stack.predicted_share:
        kernels = replace(kernels, fused_softmax="fine-tun" not in run.remarks)
    if precision == "fp8-rowwise":
        kernels = replace(kernels, fp8_rows=True)
    if "norm" in (run.act_ckpt or "").lower():
        kernels = replace(kernels, selective="norms")
    if "force_recompute_fp8_weight_in_bwd" in run.remarks:
        kernels = replace(kernels, compiled_loss=True)
    if "cross-entropy-loss-fusion=true" in run.remarks:
        te = "cross-entropy-fusion-impl=te" in run.remarks
        kernels = replace(kernels, inplace_loss=te, jit_loss=not te)
    if (run.n_experts or 0) > 1:
        kernels = replace(kernels, folded_experts=folds_experts(run))
    if any(word in run.remarks for word in _UNIQUE_DISPATCH):
        kernels = replace(kernels, unique_dispatch=True)
    return kernels


def folds_experts(run: PublishedRun) -> bool:
    """Whether each expert is on one device: as a run states, or because no further devices are left to split it."""
    tensor, spread = run.tp or 1, run.ep or 1
    stated = integer_argument(run.remarks, "expert-tensor-parallel-size")
    left = (run.n_gpus or 1) // ((run.pp or 1) * spread)
    return tensor > 1 and min(stated or tensor, max(left, 1)) == 1


def _states(run: PublishedRun, stack: Stack, precision: str, optimizer: str) -> StateLayout:
    """Return the precisions of states; parameters gathered once a step are kept besides their fp32 shards."""
    words = (run.precision or "").lower()
    states = (stack.fp16_states if words == "fp16" else None) or stack.states
    if gathers_once(run, stack) and states.parameters == "fp32":
        states = replace(states, parameters=states.gather, optimizer_bytes=states.optimizer_bytes + 4)
    if _is_fp32(precision) or "fp32+" in words:
        gather = "fp32" if _is_fp32(precision) else states.gather
        states = replace(states, parameters="fp32", gradients="fp32", reduce="fp32", gather=gather, optimizer_bytes=8)
    elif "fp32 grad" in words:
        states = replace(states, gradients="fp32", reduce="fp32")
    elif "pure" in words:
        # Composer's mixed precision PURE reduces in the precision of compute, DEFAULT in fp32.
        states = replace(states, reduce="bf16")
    moments = -4 if optimizer.startswith(("sgd", "lars")) else 0
    return replace(states, optimizer_bytes=states.optimizer_bytes + moments)


def _is_fp32(precision: str) -> bool:
    return ITEM_BYTES.get(precision) == 4
