"""Channel and filter parallelism: devices share the channels of convolutions."""
