"""Scheduling policies that come with the package, one file each."""
