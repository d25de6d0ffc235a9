"""Looks into one model, drafter or machine."""
