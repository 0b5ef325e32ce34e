"""Ways to get ranks: forked here, or born elsewhere."""
