"""Bytes that a block keeps for backward, a token, beside what Megatron-Core keeps of the same block.

python scripts/studies/kept_bytes.py

Megatron-Core's are those of Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1), tensor by tensor in half
precision: inputs of norms and matmuls, queries, keys, values and output of flash attention, input of the activation. Of
a gated MLP it keeps both projections and their product; of a mixture that of each token's copies, their inputs, and
what experts give, which the router's weights scale. The copies are gathered over a tensor group, all else is split. Its
selective recomputation is that of attention's core, of which flash attention keeps nothing: one figure stands beside
both of ours, those of a dry run and of the price of a capture.

Of compiled blocks AOTAutograd's partitioner decides, with inductor's decompositions; what it saves is told by a
sixteenth of the block on this machine, beside Megatron-Core's figure for that.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from functorch.compile import make_boxed_func
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.autograd.graph import saved_tensors_hooks

from galvatron_lite.capture.trace import trace
from galvatron_lite.model.batch import call_model, map_tensors
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.example import example_batch
from galvatron_lite.model.graph import ModelGraph, Recompute, Role
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.precision import narrow_experts, narrow_norms
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.tensor.infer_probe import find_hidden
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage
from galvatron_lite.verify.dry.step import dry_run, subject_of

HALF, FULL = 2, 4  # bytes of an item
TOKENS, SAMPLES, TENSOR = 256, 2, 8
PART, FEW, ODD = 16, 23, 3  # of compiled blocks: by what widths are divided; tokens and samples, which divide no weight


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a block."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool = True
    experts: int = 0
    choices: int = 1

    def kept(self, tensor: int) -> float:
        """Bytes a token by Megatron-Core, with so many ways of tensor and sequence parallelism."""
        kv = self.hidden // self.heads * self.kv_heads
        norms = 2 * 2 * HALF * self.hidden
        attention = HALF * (2 * self.hidden + 2 * kv) + FULL * self.heads
        inner = self.choices * HALF * self.ffn * (3 if self.gated else 2)
        copies = self.choices * HALF * self.hidden * bool(self.experts)
        return (norms + attention + inner + copies + FULL * self.experts) / tensor + copies


LLAMA = Sizes(4096, 32, 8, 14336)
GPT = Sizes(4096, 32, 32, 16384, gated=False)
MIXTRAL = Sizes(4096, 32, 8, 14336, experts=8, choices=2)
SMALL = {"vocab": 256, "layers": 3, "sequence": TOKENS}


def make_small(name: str) -> tuple[Sizes, nn.Module, dict[str, Tensor]]:
    """A sixteenth of a model, with values, and a batch of few tokens."""
    sizes, make = MODELS[name]
    heads, kv_heads = sizes.heads // 8, max(sizes.kv_heads // 8, 1)
    small = replace(sizes, hidden=sizes.hidden // PART, ffn=sizes.ffn // PART, heads=heads, kv_heads=kv_heads)
    model = make(small)
    return small, model, batch_for(model, ODD, FEW)


def batch_for(model: nn.Module, samples: int, tokens: int) -> dict[str, Tensor]:
    """So many tokens of so many samples."""
    return {key: value[:1, :tokens].expand(samples, -1).contiguous() for key, value in example_batch(model).items()}


def _zoo(name: str, sizes: Sizes, **fields: int) -> nn.Module:
    known = {"hidden": sizes.hidden, "heads": sizes.heads, "kv_heads": sizes.kv_heads, "ffn_hidden": sizes.ffn}
    return build(name, **SMALL, **known, **fields)


def _transformers(name: str, sizes: Sizes, **fields: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        hidden_size=sizes.hidden, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, use_cache=False,
        intermediate_size=sizes.ffn, num_hidden_layers=3, vocab_size=256, max_position_embeddings=TOKENS, **fields,
    )  # fmt: skip
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def _mixtral(sizes: Sizes) -> nn.Module:
    model: Any = _transformers("Mixtral", sizes, num_local_experts=sizes.experts)
    model.set_experts_implementation("grouped_mm")
    return model  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Sizes, Callable[[Sizes], nn.Module]]] = {
    "GPT": (GPT, lambda sizes: _zoo("gpt-tiny", sizes)),
    "Llama": (LLAMA, lambda sizes: _zoo("llama-tiny", sizes)),
    "Mixtral": (MIXTRAL, lambda sizes: _zoo("moe-tiny", sizes, experts=sizes.experts, choices=sizes.choices)),
    "transformers' Llama": (LLAMA, lambda sizes: _transformers("Llama", sizes)),
    "transformers' Qwen3": (LLAMA, lambda sizes: _transformers("Qwen3", sizes, head_dim=sizes.hidden // sizes.heads)),
    "transformers' Mixtral": (MIXTRAL, lambda sizes: _mixtral(sizes)),
}


def plan_of(model: nn.Module, batch: Any, block: Strategy) -> tuple[Plan, list[str]]:
    """All blocks by one strategy, on one stage; and the blocks' names."""
    edge = replace(block, recompute=Recompute.NONE, sequence_parallel=False)
    layers = discover_layers(model, batch)
    runs = [LayerRun(one.name, one.name, 1, block if one.role is Role.BLOCK else edge) for one in layers]
    plan = Plan(PLAN_VERSION, "study", block.devices, SAMPLES, 1, Schedule.ONE_F_ONE_B, "bf16", (Stage(tuple(runs)),))
    return plan, [one.name for one in layers if one.role is Role.BLOCK]


def in_dry_run(model: nn.Module, batch: Any, block: Strategy) -> float:
    """Bytes a token of the second block."""
    plan, names = plan_of(model, batch, block)
    run, _ = dry_run(subject_of(model, plan, batch), plan, 0)
    return run.kept[names[1]] / (SAMPLES * TOKENS)


def when_compiled(model: nn.Module, batch: dict[str, Tensor]) -> float:
    """Bytes a token that the second block saves, once compiled."""
    block = model.get_submodule([one.name for one in discover_layers(model, batch) if one.role is Role.BLOCK][1])
    narrow_norms(model)
    narrow_experts(model)
    caught: list[Any] = []
    handle = block.register_forward_pre_hook(lambda _, args, kwargs: caught.append((args, kwargs)), with_kwargs=True)
    with torch.autocast("cpu", torch.bfloat16):
        call_model(model, batch)
    handle.remove()
    entering = find_hidden(*caught[0])
    hidden = entering.detach().bfloat16().requires_grad_()
    args, kwargs = map_tensors(caught[0], lambda one: hidden if one is entering else one.detach())
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() % (ODD * FEW) == 0:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(keep, lambda tensor: tensor):
        torch.compile(block.forward, backend=backend)(*args, **kwargs)
    return sum(one.untyped_storage().nbytes() for one in saved.values()) / (ODD * FEW)


def priced(graph: ModelGraph, block: Strategy) -> float:
    """Bytes a token of a block."""
    kind = next(graph.kind_of(layer) for layer in graph.layers if layer.role is Role.BLOCK)
    kept, shared = kind.kept[block.recompute], block.sequence_parallel
    tokens = kept.sequence / block.tensor if shared else kept.sequence
    return (kept.tensor / block.tensor + tokens + kept.whole) / TOKENS


def compare(name: str, tensor: int, recompute: Recompute) -> tuple[float, float, float]:
    """Bytes a token of a model's block: by Megatron-Core, in a dry run, and by the price of a capture."""
    sizes, make = MODELS[name]
    with torch.device("meta"):
        model = make(sizes)
    batch = batch_for(model, SAMPLES, TOKENS)
    block = Strategy(tensor=tensor, sequence_parallel=tensor > 1, recompute=recompute)
    said = priced(trace(model, batch, precision="bf16"), block)
    return sizes.kept(tensor), in_dry_run(model, batch, block), said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name holds this text")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    heads = "block", "split", "recompute", "Megatron-Core", "dry run", "share", "price", "price/dry run"
    table = Table(*heads, box=None)
    for name in [one for one in MODELS if chosen.only in one]:
        for tensor, recompute in product((1, TENSOR), (Recompute.NONE, Recompute.SELECTIVE)):
            theirs, seen, said = compare(name, tensor, recompute)
            table.add_row(
                name, f"tensor {tensor}", recompute.value, f"{theirs:,.0f}", f"{seen:,.0f}", f"{seen / theirs:.3f}",
                f"{said:,.0f}", f"{said / seen:.3f}",
            )  # fmt: skip
        small, model, batch = make_small(name)
        theirs, seen = small.kept(1), when_compiled(model, batch)
        table.add_row(name, f"1/{PART}", "compiled", f"{theirs:,.0f}", f"{seen:,.0f}", f"{seen / theirs:.3f}", "", "")
    Console(highlight=False, width=200).print(table)


if __name__ == "__main__":
    main()
