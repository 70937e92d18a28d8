"""From a live tree to a committed record."""
