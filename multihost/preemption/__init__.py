"""Notices of preemption, and one step at which all stop."""
