"""A folder for PYTHONPATH: by it the children of a program that called `install()` call it too."""
