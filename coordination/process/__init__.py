"""Servers as processes of their own."""
