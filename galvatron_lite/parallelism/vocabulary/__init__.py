"""Logits that stay shares of the vocabulary, and losses computed on them."""
