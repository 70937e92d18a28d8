"""The face of checkpoints beside a plain dictionary of steps: seeded lives of a root."""
