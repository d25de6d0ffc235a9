"""Structured output: which tokens may follow a text, so that it stays within a schema, a pattern or a grammar."""
