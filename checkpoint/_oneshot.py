"""Saves, loads and verifies one checkpoint without a manager (follows)."""
