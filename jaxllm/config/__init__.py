"""Configuration as frozen dataclasses: what the user said, checked; each room gets its own part."""
