"""What a training run leaves in its folder: records, and how they are read."""
