"""From the record to a live tree."""
