"""Starting the world of processes that a plan is for: on this node, on hosts, under Slurm, on Ray. No torch here."""
