"""Values and pure functions that all other packages use."""
