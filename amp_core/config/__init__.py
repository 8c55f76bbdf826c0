"""The configuration; imports no torch."""
