"""Context parallelism: devices share the tokens of each sample, attention included."""
