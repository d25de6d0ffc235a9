"""Tree policies: one small file each. They see log-probabilities, depths and lengths, never a model."""
