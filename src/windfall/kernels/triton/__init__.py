"""The Triton kernels of `windfall.kernels`. The wrappers import these modules only when they run a Triton kernel."""
