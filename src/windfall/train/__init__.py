"""Training: data that the target generates, draft heads, small models, and the learned policies of papers."""
