"""The Triton side of `windfall.kernels`; imported only where Triton is to run."""
