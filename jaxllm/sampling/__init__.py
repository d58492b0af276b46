"""From logits to a token: masks, temperature, top-k, top-p and the draw."""
