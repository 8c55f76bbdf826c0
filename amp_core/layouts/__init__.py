"""How a model is distributed over processes and devices."""
