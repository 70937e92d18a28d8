"""Serves the state machine to Sessions and to gRPC's clients."""
