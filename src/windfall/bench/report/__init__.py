"""A benchmark run as a page of tables and figures."""
