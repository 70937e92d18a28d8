"""Scripts that other processes run by their path, so that they start without importing holdfast."""
