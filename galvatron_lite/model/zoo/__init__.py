"""Reference models, and small named sizes of them. Torch is imported when one is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from galvatron_lite.errors import InputError

if TYPE_CHECKING:
    from torch import nn

SIZES: dict[str, dict[str, Any]] = {
    "gpt-tiny": {"vocab": 256, "layers": 4, "hidden": 64, "heads": 4, "sequence": 64},
    "gpt-small": {"vocab": 256, "layers": 6, "hidden": 256, "heads": 8, "sequence": 256},
    "llama-tiny": {"vocab": 256, "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 176}
    | {"sequence": 64},
    "llama-small": {"vocab": 256, "layers": 6, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn_hidden": 688}
    | {"sequence": 256},
}
"""Config fields of every named size."""


def build(name: str, **overrides: Any) -> nn.Module:
    """A reference model by name (``gpt-tiny``), on the current default device.

    Args:
        name: a key of ``SIZES``.
        overrides: config fields to change (``layers=2``).

    Raises:
        InputError: no size of that name, or a config field that does not exist.
    """
    if name not in SIZES:
        raise InputError("model", name, f"Choose one of {', '.join(SIZES)}.")
    from galvatron_lite.model.zoo.gpt import GPT, GPTConfig
    from galvatron_lite.model.zoo.llama import Llama, LlamaConfig

    fields = SIZES[name] | overrides
    config = GPTConfig if name.startswith("gpt") else LlamaConfig
    unknown = set(fields) - set(config.__dataclass_fields__)
    if unknown:
        raise InputError("overrides", sorted(unknown), f"The fields are {', '.join(config.__dataclass_fields__)}.")
    return GPT(GPTConfig(**fields)) if config is GPTConfig else Llama(LlamaConfig(**fields))
