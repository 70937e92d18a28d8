"""A folder for PYTHONPATH: children of a program that called `install()` call it too, before
anything else.
"""
