"""Policies learnt by reinforcement: environments over the engine or over recorded trees, and PPO on them."""
