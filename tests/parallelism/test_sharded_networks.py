"""Networks that know nothing of cut tensors, against one process: theirs are the functions that users call."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.parallelism.sharded.collectives import distribute, full_tensor
from galvatron_lite.parallelism.spatial.rules import PIXELS_RULES
from tests.parallelism.sharded_functions import cuts_on, picture, results_of, weights
from tests.parallelism.thread_group import ThreadGroup, grid_groups, run_threads

SMALL = {"hidden_sizes": [8, 16], "depths": [1, 1]}


class Gate(nn.Module):
    """What users write by hand: crops, gates, shuffles, statistics and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.project, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, ...]:
        skip = functional.gelu(self.down(pixel_values))
        up = self.up(functional.silu(skip, inplace=False))[..., 1:-2, :-1]
        top, left = (up.size(-2) - skip.size(-2)) // 2, (up.size(-1) - skip.size(-1)) // 2
        cropped = up[:, :, top : top + skip.size(-2), left : left + skip.size(-1)]
        both = torch.cat([cropped, skip], dim=1)
        mixed = functional.channel_shuffle(both, 2).view(-1, 2, 8, *both.shape[2:]).sum(1)
        gate = mixed.mean((2, 3), keepdim=True).sigmoid()
        normed = (mixed - mixed.mean(1, keepdim=True)) * torch.rsqrt(mixed.var(1, keepdim=True) + 1e-6) * self.scale
        tokens = self.project(normed.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) * gate
        a, b = tokens.chunk(2, 1)
        tokens = torch.cat(((a * 1).relu_(), b[:, [1, 0, 3, 2]]), 1)
        pooled = torch.cat([tokens.amax((2, 3)), functional.adaptive_avg_pool2d(tokens, 1).flatten(1)], 1)
        alike = functional.cosine_similarity(tokens, skip).unsqueeze(1)
        return functional.interpolate(tokens * alike, size=pixel_values.shape[-2:]), pooled


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "by hand": Gate,
    "resnet": lambda: hf.ResNetModel(hf.ResNetConfig(embedding_size=8, layer_type="basic", **SMALL)),
    "convnextv2": lambda: hf.ConvNextV2Model(hf.ConvNextV2Config(num_stages=2, **SMALL)),
    "regnet": lambda: hf.RegNetModel(hf.RegNetConfig(embedding_size=8, groups_width=4, **SMALL)),
    "bit": lambda: hf.BitModel(hf.BitConfig(embedding_size=8, num_groups=4, **SMALL)),
    "upernet": lambda: hf.UperNetForSemanticSegmentation(
        hf.UperNetConfig(
            backbone_config=hf.ConvNextConfig(
                hidden_sizes=[4, 4, 8, 8], depths=[1, 1, 1, 1], out_features=["stage1", "stage2", "stage3", "stage4"]
            ),
            hidden_size=8, auxiliary_in_channels=8, auxiliary_channels=8, num_labels=4, pool_scales=[1, 2],
        )
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch")
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_as_in_one_process(name: str) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name]().double().train()
    pixels = picture(2, 3, 42, 37) if name == "by hand" else picture(2, 3, 64, 64)

    def train(model: nn.Module, given: Tensor, ranks: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        made = model(pixel_values=given)
        results = [full_tensor(one) for one in results_of(tuple(made.values()) if isinstance(made, dict) else made)]
        loss = torch.stack([(one * w).sum() for one, w in zip(results, weights(results), strict=True)]).sum() / ranks
        loss.backward()
        return [one.detach() for one in results], {
            key: torch.zeros_like(one) if one.grad is None else one.grad for key, one in model.named_parameters()
        }

    def work(group: ThreadGroup) -> tuple[list[Tensor], dict[str, Tensor]]:
        lines = grid_groups(group, 2, 2)
        return train(
            copy.deepcopy(network), distribute(pixels.clone(), cuts_on(pixels, (2, 3), lines), PIXELS_RULES), 4
        )

    expected, gradients = train(copy.deepcopy(network), pixels.clone(), 1)
    everyone = run_threads(4, work)
    for found, _ in everyone:
        for one, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(one, wanted, rtol=1e-10, atol=1e-10)
    for key, gradient in gradients.items():
        total = torch.stack([grads[key] for _, grads in everyone]).sum(0)
        torch.testing.assert_close(total, gradient, rtol=1e-10, atol=1e-10)
