"""Launchers of the processes of a plan: on this node, over ssh, by Slurm or by Ray. No torch here."""
