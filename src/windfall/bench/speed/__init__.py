"""`windfall bench speed`: passes and methods against plain decoding and transformers."""
