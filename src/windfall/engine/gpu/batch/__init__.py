"""Several requests at a time on a GPU: a KV cache in pages, and rounds of draft passes and one shared verify pass."""
