"""How much of the host's memory this process may use, and how much of that it uses."""
