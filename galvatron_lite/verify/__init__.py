"""Check a plan without its cluster, by running its ranks on this machine."""
