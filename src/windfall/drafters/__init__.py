"""Drafters: where the proposed tokens come from."""
