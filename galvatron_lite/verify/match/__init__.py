"""Whether the messages of all ranks of the world meet, as they would on the cluster."""
