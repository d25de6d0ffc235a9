"""Finds, converts and reads weights."""
