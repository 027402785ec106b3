"""Tiles of one set of adapters each: gather on load, shrink, expand, scatter on store."""
