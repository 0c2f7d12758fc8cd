"""Small blocks that the others are built from."""
