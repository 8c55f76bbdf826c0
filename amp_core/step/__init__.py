"""What an optimizer step is."""
