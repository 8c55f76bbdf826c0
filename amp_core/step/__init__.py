"""One optimizer step: scale, check, clip, step, update, and what follows it."""
