"""16-bit and 8-bit storage and arithmetic."""
