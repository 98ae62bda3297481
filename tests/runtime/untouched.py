"""Models as their users make them, trained under plans and by plain PyTorch; jobs of several tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite import auto_parallelize
from galvatron_lite.errors import InfeasibleError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.engine import ParallelModel
from tests.auto_jobs import measuring_briefly
from tests.equivalence.compare import assert_equal_tensors
from tests.runtime.plans import losses_alone, make_plan

SAMPLES, TOKENS, VOCAB, STEPS = 4, 32, 48, 2
ADAMW = {"lr": 1e-2, "eps": 1e-4}  # a tiny eps would make steps of rounding noise in gradients that are zero in theory
TEXT = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": TOKENS,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
TWO_SIDES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
}  # fmt: skip
DECODERS: Mapping[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Phi3": GROUPED,
    "Gemma2": GROUPED | {"head_dim": 8},
    "Gemma3Text": GROUPED | {"head_dim": 8},
    "Qwen3": GROUPED | {"head_dim": 8},
    "DeepseekV3": LATENT | EXPERTS | {"num_key_value_heads": 4, "first_k_dense_replace": 1},
    "Jamba": GROUPED | {"num_experts": 2, "mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Phi": {},
    "GPT2": {},
}
NO_DROPOUT = (
    "dropout", "attention_dropout", "activation_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate",
    "attention_probs_dropout_prob", "hidden_dropout_prob", "hidden_dropout", "ffn_dropout", "summary_first_dropout",
)  # fmt: skip

Changed = Callable[[nn.Module], nn.Module]


class Adapter(nn.Module):
    """Adds a trained product of two small matrices to a frozen linear layer, as LoRA does."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 4, bias=False)
        self.up = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


class Adapted(nn.Module):
    """Holds a frozen model of transformers, with adapters on its queries and values, as PEFT's models do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model.requires_grad_(False)
        for module in list(model.modules()):
            for name in ("q_proj", "v_proj"):
                if isinstance(getattr(module, name, None), nn.Linear):
                    setattr(module, name, Adapter(getattr(module, name)))

    def forward(self, **batch: Any) -> Any:
        return self.base_model(use_cache=True, **batch)


def untouched(family: str) -> nn.Module:
    """A tiny model of transformers, its defaults untouched but for its size and dropout; always the same."""
    import transformers

    torch.manual_seed(0)
    if family == "Adapted":
        return Adapted(untouched("Llama")).train()
    if family == "T5":
        config, kind = transformers.T5Config(**TEXT, **T5), "T5ForConditionalGeneration"
    elif family in ("Bart", "Whisper"):
        own = {"max_position_embeddings": TOKENS} if family == "Bart" else {
            "num_mel_bins": 4, "max_source_positions": TOKENS, "max_target_positions": TOKENS,
        }  # fmt: skip
        config = getattr(transformers, f"{family}Config")(**TEXT, **TWO_SIDES, **own, decoder_start_token_id=1)
        kind = f"{family}ForConditionalGeneration"
    else:
        config = getattr(transformers, f"{family}Config")(**TEXT, **SHAPE, **DECODERS[family])
        kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family.removesuffix('Text')}ForCausalLM"
    for name in NO_DROPOUT:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    model: nn.Module = getattr(transformers, kind)(config)
    assert getattr(config, "use_cache", True)
    return model.train()


def batch_for(family: str, samples: int = SAMPLES) -> dict[str, Any]:
    """Texts, of which some end early, and their labels; spectra for Whisper."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (samples, TOKENS), generator=generator)
    if family == "Whisper":
        return {"input_features": torch.randn(samples, 4, 2 * TOKENS, generator=generator), "labels": ids}
    mask = torch.ones_like(ids)
    mask[::2, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def trained_plainly(model: nn.Module, batch: Any, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a few steps of AdamW in one process, and the parameters after them."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], **ADAMW)
    losses = losses_alone(model, optimizer, [batch] * steps)
    return losses, {name: value.detach() for name, value in model.named_parameters()}


@cache
def alone(family: str, change: Changed, more: tuple[tuple[str, Any], ...]) -> tuple[list[float], dict[str, Tensor]]:
    """The same of a family, changed; ``more`` goes into the batch."""
    return trained_plainly(change(untouched(family)), batch_for(family) | dict(more))


def same_strategy(model: nn.Module, batch: Any, block: Strategy, edge: Strategy, parts: int = 1) -> tuple[Plan, Any]:
    """A plan of one stage whose blocks have one strategy, and the layers."""
    layers = discover_layers(model, batch)
    # tables of embeddings may be tied to the head, whose strategy they must have
    split = [one.role is Role.BLOCK and not isinstance(model.get_submodule(one.name), nn.Embedding) for one in layers]
    chosen = [block if one else edge for one in split]
    return make_plan([[layer.name for layer in layers]], [chosen], SAMPLES, parts), layers


def difference(parallel: Any, batch: Any, expected: tuple[list[float], dict[str, Tensor]]) -> str:
    """What differs from plain training after a few steps; empty where nothing does."""
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    losses = [float(parallel.train_step(batch, optimizer)) for _ in expected[0]]
    state = parallel.full_state_dict()
    try:
        torch.testing.assert_close(losses, expected[0], rtol=1e-4, atol=0)
        assert_equal_tensors({name: state[name] for name in expected[1]}, expected[1], 1e-4)
    except AssertionError as error:
        return str(error)
    return ""


def unchanged(model: nn.Module) -> nn.Module:
    return model


def under(family: str, block: Strategy, edge: Strategy, change: Changed = unchanged, **more: Any) -> str:
    """What differs for a family under a plan; ``more`` goes into the batch."""
    batch, model, expected = (
        batch_for(family) | more,
        change(untouched(family)),
        alone(family, change, (*more.items(),)),
    )
    plan, layers = same_strategy(model, batch, block, edge)
    return difference(ParallelModel(model, plan, layers, batch, device="cpu"), batch, expected)


def automatic(family: str, folder: str, tight: bool = False) -> tuple[Any, str]:
    """Under the plan that ``auto_parallelize`` chooses without a profile: what is recomputed, and what differs.

    Args:
        family: see ``untouched``.
        folder: of profiles.
        tight: whether memory is what the plan of least memory takes.
    """
    batch = batch_for(family)
    expected = trained_plainly(untouched(family), batch)

    def parallel(mem: int | str) -> Any:
        return auto_parallelize(untouched(family), batch, mem=mem, folder=Path(folder))

    # where memory is scarce layers are not split: a fourth of all that there is to measure
    with measuring_briefly(max_samples=1, tensor_degrees=[1] if tight else None):
        made = parallel(_least_memory(parallel) if tight else "95%")
    recomputed = {one.strategy.recompute.value for stage in made.plan.stages for one in stage.runs}
    return sorted(recomputed), difference(made, batch, expected)


def _least_memory(parallel: Callable[[int | str], Any]) -> int:
    """Bytes of the smallest budget that a plan fits."""
    try:
        parallel(1)
    except InfeasibleError as error:
        return error.smallest_budget or 0
    raise AssertionError("no plan fits in a byte")
