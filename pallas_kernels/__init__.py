"""Kernels for LLM serving that stand alone: jax and numpy are all they need."""
