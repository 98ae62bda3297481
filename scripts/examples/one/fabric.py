"""Lightning Fabric."""

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16,
)  # fmt: skip
model = LlamaForCausalLM(config)
tokens = torch.randint(0, 64, (48, 16))
loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
fabric = Fabric(devices=1)
model, optimizer = fabric.setup(model, optimizer)
for batch in fabric.setup_dataloaders(loader):
    loss = model(**batch).loss
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.6f}")
