"""Other people's checkpoints, and ours, behind one seam."""
