"""Named parts: atomic, verified, rotated."""
