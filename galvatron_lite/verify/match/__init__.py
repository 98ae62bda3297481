"""Check that the messages of all ranks match, as they must on the cluster."""
