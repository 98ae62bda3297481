"""transformers' Trainer around split models: padded batches, what it saves and what it shows."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from galvatron_lite import as_one_process, auto_parallelize
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from tests.pool import WorkerPool
from tests.runtime.plans import make_plan

SAMPLES, TOKENS, WORDS = 8, 12, 40
SHAPE: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": TOKENS, "pad_token_id": 0,
}  # fmt: skip

UNSUPPORTED = {
    "gradient_checkpointing": True, "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0,
    "gradient_accumulation_steps": 2,
}  # fmt: skip


def made(family: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    if family == "mixtral":
        config = transformers.MixtralConfig(
            **SHAPE, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5
        )
        return transformers.MixtralForCausalLM(config)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True))


def plan_of(family: str) -> Plan:
    """Shares of unlike numbers of labels: of experts' samples, or of a tied head's in micro-batches."""
    block = Strategy(data=2, expert=2) if family == "mixtral" else Strategy(tensor=2)
    names, data = ["before", "model.layers.0", "model.layers.1", "after"], Strategy(data=2)
    if family == "pipeline":
        return make_plan([names[:2], names[2:]], [[Strategy()] * 2] * 2, SAMPLES, 2)
    return make_plan([names], [[data, block, data, data]], SAMPLES, 1 if family == "mixtral" else 2)


def padded_rows() -> list[Mapping[str, Tensor]]:
    """Texts of two batches, most of them short."""
    torch.manual_seed(1)
    rows = []
    for length in (12, 11, 9, 5, 3, 3, 2, 4) * 2:
        mask = (torch.arange(TOKENS) < length).long()
        words = torch.randint(1, WORDS, (TOKENS,)) * mask
        rows.append({"input_ids": words, "attention_mask": mask, "labels": words.where(mask.bool(), -100)})
    return rows


def losses(trainer: transformers.Trainer) -> list[float]:
    """Of each step, and the norms of its gradient."""
    trainer.train()
    return [entry[key] for entry in trainer.state.log_history[:-1] for key in ("loss", "grad_norm")]


def evaluated(trainer: transformers.Trainer) -> list[float]:
    """The loss of other data, twice, and the mean of the logits there."""
    rows = padded_rows()[:SAMPLES]
    found = trainer.predict(rows)
    made = found.predictions if isinstance(found.predictions, tuple) else (found.predictions,)
    (logits,) = (one for one in made if getattr(one, "shape", ()) == (SAMPLES, TOKENS, WORDS))
    loss = trainer.evaluate(rows)["eval_loss"]
    return [found.metrics["test_loss"], loss, float(abs(logits).mean())]


def arguments(folder: Path, **others: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=SAMPLES, num_train_epochs=1, learning_rate=1e-2, logging_steps=1,
        report_to=[], save_strategy="no", remove_unused_columns=False, disable_tqdm=True, use_cpu=True, **others,
    )  # fmt: skip


def trained(folder: Path, families: list[str]) -> list[tuple[list[float], str]]:
    """Of each family: losses, and what a rank shows."""
    from galvatron_lite.frameworks.hugging_face import Trainer

    before, told = dict(os.environ), seen_by_the_trainer(folder)
    assert "as_one_process()" in told
    as_one_process("cpu")
    found = []
    for family in families:
        rows = padded_rows()
        batch = {name: torch.stack([row[name] for row in rows[:SAMPLES]]) for name in rows[0]}
        parallel = auto_parallelize(made(family), batch, plan=plan_of(family), device="cpu")
        with redirect_stdout(io.StringIO()) as said:
            trainer = Trainer(parallel, arguments(folder), train_dataset=rows)
            found.append((losses(trainer) + evaluated(trainer), said.getvalue()))
        trainer.save_model(str(folder / family))
    os.environ.update(before)
    return found


def seen_by_the_trainer(folder: Path) -> str:
    """What is said where a script forgot that it is to run as one process."""
    from galvatron_lite.frameworks.hugging_face import Trainer

    parallel = auto_parallelize(made("qwen2"), global_batch=SAMPLES, plan=plan_of("qwen2"), device="cpu")
    for name, value in UNSUPPORTED.items():
        with pytest.raises(InputError, match=name):
            Trainer(parallel, arguments(folder, **{name: value}), train_dataset=padded_rows())
    with pytest.raises(InputError, match="compute_loss_func"):
        Trainer(parallel, arguments(folder), compute_loss_func=print)
    with pytest.raises(InputError) as raised:
        Trainer(parallel, arguments(folder), train_dataset=padded_rows())
    return str(raised.value)


def test_padded_batches_train_like_one_process(pool: WorkerPool, tmp_path: Path) -> None:
    families = ["mixtral", "qwen2", "pipeline"]
    expected, alone = {}, {}
    for name in families:
        alone[name] = transformers.Trainer(made(name), arguments(tmp_path), train_dataset=padded_rows())
        expected[name] = losses(alone[name]) + evaluated(alone[name])
    first, second = pool.run(2, trained, folder=tmp_path, families=families)
    for name, (found, said), (_, other) in zip(families, first, second, strict=True):
        assert found == pytest.approx(expected[name], rel=1e-4)
        assert "'loss'" in said
        assert "'loss'" not in other
        saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        own = alone[name].model.state_dict()
        assert all(torch.allclose(value, own[key], atol=1e-4) for key, value in saved.state_dict().items())
        assert saved.config.architectures == [type(saved).__name__] == [type(made(name)).__name__]
