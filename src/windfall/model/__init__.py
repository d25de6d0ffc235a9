"""Runs a transformers model over the rows of a draft tree."""
