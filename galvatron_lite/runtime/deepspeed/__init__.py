"""Plans that DeepSpeed's engine trains."""
