"""Draft heads, which predict tokens from the target's hidden states, and their file formats."""
