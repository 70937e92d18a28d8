"""Arrays as jax has them: dtypes, shardings, and the settings that they are made under."""
