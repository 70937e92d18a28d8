"""What is wrong with a job, in sentences: status and stacks in, findings out. Pure; the status command, the page and launchers read it."""
