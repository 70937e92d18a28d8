"""Trees as flat dicts, and their leaves taken from elsewhere: `orbax.checkpoint.tree`."""
