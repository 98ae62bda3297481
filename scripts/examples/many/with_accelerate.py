"""accelerate."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from galvatron_lite import as_one_process, auto_parallelize

as_one_process()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16,
)  # fmt: skip
model = LlamaForCausalLM(config)
tokens = torch.randint(0, 64, (48, 16))
loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=8)
model = auto_parallelize(model, next(iter(loader)))
optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2)
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = model(**batch)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.6f}")
