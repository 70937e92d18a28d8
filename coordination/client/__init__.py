"""Speaks to a service."""
