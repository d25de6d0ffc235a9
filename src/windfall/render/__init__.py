"""What commands show: text, tables, drawings of trees, plots."""
