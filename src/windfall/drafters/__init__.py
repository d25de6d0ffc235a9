"""Drafters, which propose tokens."""
