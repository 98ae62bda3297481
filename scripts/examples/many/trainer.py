"""transformers' Trainer."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from galvatron_lite import as_one_process, auto_parallelize
from galvatron_lite.frameworks.hugging_face import Trainer

as_one_process()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16,
)  # fmt: skip
model = LlamaForCausalLM(config)
tokens = torch.randint(0, 64, (48, 16))
data = [{"input_ids": row, "labels": row} for row in tokens]
args = TrainingArguments(
    "output", per_device_train_batch_size=8, num_train_epochs=1, learning_rate=1e-2, logging_steps=1, report_to=[],
    save_strategy="no", remove_unused_columns=False, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(auto_parallelize(model, global_batch=8), args, train_dataset=data)
trainer.train()
for entry in trainer.state.log_history[:-1]:
    print(f"loss {entry['loss']:.6f}")
