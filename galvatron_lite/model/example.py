"""Example batches for models that describe their inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from galvatron_lite.errors import InputError

if TYPE_CHECKING:
    from torch import nn

SAMPLES = 8
_LONGEST = 512
_SOUND, _SPOKEN = 16000, 16  # samples of a second of sound, and tokens spoken in it
_SIDE = 224
"""Pixels along each side of pictures if the configuration has no size: a network of convolutions takes any."""


_EXAMPLE = "Return (model, batch) from the function, or pass an example batch to auto_parallelize."


def example_batch(model: nn.Module, samples: int = SAMPLES, sequence: int | None = None) -> Any:
    """Make a batch of random inputs for a model of the zoo or of Hugging Face transformers.

    A model may offer ``example_batch(samples)`` itself. For transformers models the inputs follow the configuration:
    token ids for language models, pixel values for image models, sound for speech models; each with labels.

    Args:
        model: that takes the batch.
        samples: of the batch.
        sequence: tokens a sample of a transformers model; if None its positions, 512 at most.

    Raises:
        InputError: the model does not describe its inputs.
    """
    method = getattr(model, "example_batch", None)
    if callable(method):
        return method(samples)
    config: Any = getattr(model, "config", None)
    main = getattr(model, "main_input_name", "input_ids")
    if main == "input_values" or (main == "input_features" and hasattr(config, "num_mel_bins")):
        return _sound(model, main, samples, sequence)
    import torch

    generator = torch.Generator().manual_seed(0)
    if hasattr(config, "num_channels"):
        size = getattr(config, "image_size", _SIDE)
        extent = (size, size) if isinstance(size, int) else tuple(size)
        pixels = torch.rand((samples, config.num_channels, *extent), generator=generator)
        labels = torch.randint(0, max(getattr(config, "num_labels", 1), 1), (samples,), generator=generator)
        return {"pixel_values": pixels, "labels": labels}
    if hasattr(config, "vocab_size") and main != "input_features":
        longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or _LONGEST
        length = sequence or min(int(longest), _LONGEST)
        ids = torch.randint(0, config.vocab_size, (samples, length), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}
    name = type(model).__name__
    raise InputError("batch", None, f"{name} does not say what it takes. {_EXAMPLE}")


def _sound(model: Any, main: str, samples: int, sequence: int | None) -> dict[str, Any]:
    """Spectra of as many frames as the model has positions, or a second of sound; labels are classes or tokens."""
    import torch

    config, generator = model.config, torch.Generator().manual_seed(0)
    frames = 2 * getattr(config, "max_source_positions", _LONGEST)
    shape = (samples, config.num_mel_bins, frames) if main == "input_features" else (samples, _SOUND)
    if "Classification" in type(model).__name__:
        labels = torch.randint(0, config.num_labels, (samples,), generator=generator)
    else:
        length = sequence or min(int(getattr(config, "max_target_positions", None) or _SPOKEN), _LONGEST)
        labels = torch.randint(4, config.vocab_size, (samples, length), generator=generator)
    return {main: torch.rand(shape, generator=generator), "labels": labels}
