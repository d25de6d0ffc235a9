"""Decoding that stays on the device, in fixed buffers and CUDA graphs.

Draft passes, choice of rows, verify pass, draws, walk and cache update of a cycle run without waiting for the host,
except for the decisions of a plan. Kernels publish results to host memory (`mailbox`), and the host reads them while
the next cycle runs. All graphs that a plan can need are captured before its first text, except for models that run
under a mask. `batch` runs several requests at a time.
"""
