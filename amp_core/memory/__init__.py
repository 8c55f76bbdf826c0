"""The same bits in less memory or time."""
