"""Computing activations again instead of keeping them."""
