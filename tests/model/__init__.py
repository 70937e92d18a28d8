"""Reference models: what a face has to answer, said once more in a few plain rules."""
