"""For NeMo Framework: a YAML file of Megatron-Bridge, whose settings override those of a recipe.

The framework's training of language models is Megatron-Bridge (nemo_toolkit 3 holds speech alone); sections and keys
are those of its ``ConfigContainer``.
"""

from __future__ import annotations

import yaml

from galvatron_lite.plans.export.common import Exported, head
from galvatron_lite.plans.export.megatron import settings_of
from galvatron_lite.plans.schema import Plan

TOOL = "nemo"
_PRECISION = {"bf16": "bf16_mixed", "fp16": "fp16_mixed"}


def exported(plan: Plan) -> Exported:
    """The file for a recipe's ``--config-file``."""
    told = settings_of(plan)
    optimizer = {**told.optimizer, **({"use_distributed_optimizer": True} if told.ddp else {})}
    sections = {"model": dict(told.model), "train": dict(told.train), "ddp": dict(told.ddp), "optimizer": optimizer}
    data: dict[str, object] = {name: values for name, values in sections.items() if values}
    if told.precision in _PRECISION:
        data["mixed_precision"] = _PRECISION[told.precision]
    text = head(plan, "NeMo (Megatron-Bridge)", told.left_out) + yaml.safe_dump(data, sort_keys=False)
    return Exported(TOOL, text, told.left_out)
