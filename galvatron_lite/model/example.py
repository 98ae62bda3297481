"""An example batch for a model that can say what it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from galvatron_lite.errors import InputError

if TYPE_CHECKING:
    from torch import nn

SAMPLES = 8
_LONGEST = 512
_SIDE = 224
"""Pixels along each side of pictures where a configuration does not say: a network of convolutions takes any."""


def example_batch(model: nn.Module, samples: int = SAMPLES) -> Any:
    """A batch of random inputs for a model of the zoo or of Hugging Face transformers.

    A model may offer ``example_batch(samples)`` itself. For transformers models the inputs follow the configuration:
    token ids with labels for language models, pixel values with labels for image models.

    Raises:
        InputError: the model does not say what it takes.
    """
    own = getattr(model, "example_batch", None)
    if callable(own):
        return own(samples)
    config = getattr(model, "config", None)
    if hasattr(config, "num_channels"):
        return _images(config, samples)
    if hasattr(config, "vocab_size"):
        return _tokens(config, samples)
    name = type(model).__name__
    raise InputError("batch", None, f"{name} does not say what it takes. Give an example batch as the second argument.")


def _tokens(config: Any, samples: int) -> dict[str, Any]:
    import torch

    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or _LONGEST
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (samples, min(int(longest), _LONGEST)), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _images(config: Any, samples: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    size = getattr(config, "image_size", _SIDE)
    extent = (size, size) if isinstance(size, int) else tuple(size)
    pixels = torch.rand((samples, config.num_channels, *extent), generator=generator)
    labels = torch.randint(0, max(getattr(config, "num_labels", 1), 1), (samples,), generator=generator)
    return {"pixel_values": pixels, "labels": labels}
