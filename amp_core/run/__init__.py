"""A run: environment, launch, log, loop."""
