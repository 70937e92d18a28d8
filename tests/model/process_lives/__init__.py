"""Lives of processes that save: who saves, who holds the manager, and how the process ends."""
