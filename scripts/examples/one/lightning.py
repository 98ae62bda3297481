"""Lightning's Trainer."""

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


class Training(pl.LightningModule):
    """A language model and its optimizer."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, _):
        """The loss of a batch."""
        loss = self.model(**batch).loss
        print(f"loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self):
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16,
)  # fmt: skip
model = LlamaForCausalLM(config)
tokens = torch.randint(0, 64, (48, 16))
loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=8)
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(Training(model), loader)
