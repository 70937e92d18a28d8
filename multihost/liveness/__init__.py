"""Who is alive, and whether this process gets on."""
