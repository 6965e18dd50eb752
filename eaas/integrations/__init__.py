"""Other programs' front doors to an expert pool."""
