"""Part servers, and how the other processes of a job reach them."""
