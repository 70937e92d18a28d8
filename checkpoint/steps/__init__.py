"""Which steps there are, and who may write or delete them."""
