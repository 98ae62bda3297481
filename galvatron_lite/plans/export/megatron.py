"""For Megatron-LM: flags of ``pretrain_gpt.py`` and its like (``megatron/training/arguments.py``), one a line.

``xargs`` takes the file as it is: ``grep -v '^#' megatron.args | xargs torchrun pretrain_gpt.py ...``.
"""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from galvatron_lite.plans.export.common import Exported, head
from galvatron_lite.plans.export.megatron_settings import settings_of
from galvatron_lite.plans.schema import Plan

TOOL = "megatron"


def exported(plan: Plan) -> Exported:
    """The flags that say how the model is split; those of the model itself are the user's."""
    told = settings_of(plan)
    values = {**told.model, **told.train, **told.ddp, **told.optimizer}
    lines = [line for name, value in values.items() for line in _flag(name, value)]
    lines += [quote(f"--{told.precision}")] if told.precision != "fp32" else []
    text = head(plan, "Megatron-LM", told.left_out) + "".join(f"{line}\n" for line in lines)
    return Exported(TOOL, text, told.left_out)


def _flag(name: str, value: object) -> Iterator[str]:
    """Nothing for a switch that is off."""
    flag = "--" + name.replace("_", "-")
    if value is True:
        yield flag
    elif value is not False:
        yield f"{flag} {quote(str(value))}"
    if name == "optimizer_cpu_offload":
        yield "--use-precision-aware-optimizer"
