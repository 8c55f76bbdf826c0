"""A model over processes."""
