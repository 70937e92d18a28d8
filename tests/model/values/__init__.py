"""Other people's values and trees: drawn, saved in each way, brought back in each way, compared."""
