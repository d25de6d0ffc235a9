"""Policies from the literature, one file each."""
