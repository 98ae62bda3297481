"""Checkpoints: written under one plan, read under any other, by the plain model, and by Hugging Face."""
