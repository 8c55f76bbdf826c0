"""What breaks a window, why, and what to change: locate, watch, heal, forecast, advise."""
