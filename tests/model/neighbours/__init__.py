"""Roots of ours among the files of other tools: drawn, gone through in each way, compared."""
