"""The papers' tables and studies, with published numbers."""
