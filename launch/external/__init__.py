"""Jobs that another launcher starts: tasks, Kubernetes."""
