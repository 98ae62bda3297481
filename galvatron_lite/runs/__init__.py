"""Records of a training run in its folder, and their reader."""
