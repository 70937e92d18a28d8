"""Bytes and names, on disks and in object stores."""
