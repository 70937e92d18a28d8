"""What is wrong with a job, in sentences, and how far it was: status and stacks in. Pure; `holdfast
status`, page and launchers read it.
"""
