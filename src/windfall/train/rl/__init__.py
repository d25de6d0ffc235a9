"""Reinforcement learning of the LTD policies: rollouts, environments, PPO, evaluation."""
