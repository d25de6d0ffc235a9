"""Values and pure functions that everything else is made of."""
