"""Serves the state machine over gRPC."""
