"""The model of the multihost and coordination face: lives of a job over a bad network."""
