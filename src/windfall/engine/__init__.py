"""Generates text: the decode loop on the host, and in `gpu` the same loop in CUDA graphs."""
