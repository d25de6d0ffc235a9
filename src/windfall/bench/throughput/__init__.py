"""`windfall bench throughput`: tokens per second of many requests at once."""
