"""Training: what the target writes, and the drafters that learn to write it."""
