"""Checkpoint files to arrays on the device: readers of each format, name maps, and the loader."""
