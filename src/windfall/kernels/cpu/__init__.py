"""Kernels in C for CPUs, compiled on the machine where they run."""
