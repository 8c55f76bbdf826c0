"""Hydra looks for plugins below `hydra_plugins`."""
