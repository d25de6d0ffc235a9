"""Decoding that stays on the device: fixed buffers, CUDA graphs, one small copy back per cycle."""
