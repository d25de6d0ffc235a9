"""Benchmarks: tasks and methods, runs and records, tables, figures and reports."""
