"""Losses and heads that recipes share."""
