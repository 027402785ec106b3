"""Experiments: one module per question, a registry of them, and the folders their runs write."""
