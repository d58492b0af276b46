"""Plain data that every room speaks: no behaviour beyond validation, no jax."""
