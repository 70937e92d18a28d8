"""How a process joins its job, and leaves it."""
