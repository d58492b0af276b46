"""Building blocks of models: pure functions and small flax.nnx modules over ragged token rows."""
