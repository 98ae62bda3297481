"""A Mixtral style decoder language model: a Llama whose MLPs are mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.errors import InputError
from galvatron_lite.model.zoo.gpt import initialise
from galvatron_lite.model.zoo.llama import Llama, LlamaBlock, LlamaConfig


@dataclass(frozen=True, slots=True)
class MoEConfig(LlamaConfig):
    """Shape of a mixture; ``ffn_hidden`` is the inner width of one expert."""

    experts: int = 8  # per block
    choices: int = 2  # experts that a token visits

    def __post_init__(self) -> None:
        # super() does not work in dataclasses with slots
        LlamaConfig.__post_init__(self)
        if not 1 <= self.choices <= self.experts:
            raise InputError("choices", self.choices, f"A token visits 1 to {self.experts} experts.")


class Experts(nn.Module):
    """Gated SiLU MLPs with stacked weights: maps (tokens, hidden) to weighted sums of the chosen experts' outputs."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        shape = config.experts, config.ffn_hidden, config.hidden
        self.gate_proj, self.up_proj = (nn.Parameter(torch.empty(shape)) for _ in range(2))
        self.act = nn.SiLU()
        self.down_proj = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Sort copies of tokens by expert, and run one grouped matmul per projection.

        Args:
            hidden: (tokens, hidden).
            index: (tokens, choices) numbers of experts.
            weights: (tokens, choices).
        """
        order = torch.argsort(index.flatten(), stable=True)
        numbers = torch.arange(1, len(self.up_proj) + 1, device=index.device)
        ends = torch.searchsorted(index.flatten()[order], numbers).int()
        rows = hidden[order // index.shape[-1]]
        gate, up = (_grouped(rows, weight, ends) for weight in (self.gate_proj, self.up_proj))
        output = _grouped(self.act(gate) * up, self.down_proj, ends)
        # index_copy would save the rows for backward
        copies = torch.empty_like(output).index_put((order,), output).view(*index.shape, hidden.shape[-1])
        return (copies * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows (rows, inner) of each expert, up to its end, by its weight (experts, columns, inner)."""
    return F.grouped_mm(rows.to(weight.dtype), weight.transpose(-2, -1), offs=ends)


class Mixture(nn.Module):
    """Router and experts; maps (samples, tokens, hidden) to the same shape."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.choices = config.choices
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = Experts(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Send each token to the experts of its largest logits, weighted by their softmax."""
        tokens = hidden.flatten(0, -2)
        logits, index = self.router(tokens).float().topk(self.choices, dim=-1)
        mixed: Tensor = self.experts(tokens, index, logits.softmax(-1).to(hidden.dtype))
        return mixed.view_as(hidden)


class MoEBlock(LlamaBlock):
    """A Llama block whose MLP is a mixture."""

    inner = Mixture


class MoE(Llama):
    """Decoder language model whose MLPs are mixtures of experts."""

    block = MoEBlock

    def _init_weights(self, module: nn.Module) -> None:
        initialise(module)
        if isinstance(module, Experts):
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.02)
