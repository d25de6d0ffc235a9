"""Draft heads: small modules that guess on from the target's hidden states, and the files they live in."""
