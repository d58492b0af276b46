"""KV memory as page numbers: who holds which page, what can be found again. No arrays, no jax."""
