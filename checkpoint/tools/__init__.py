"""One checkpoint to another place or shape."""
