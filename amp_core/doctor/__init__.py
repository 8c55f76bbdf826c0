"""The doctor: finds the first non-finite value of a window, its cause and a fix: locate, watch, heal, statistics."""
