"""Orbax's own handlers: what each kind of item is, and how a subclass changes it."""
