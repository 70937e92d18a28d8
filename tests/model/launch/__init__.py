"""The launcher beside a few plain rules: seeded lives of jobs on an engine in virtual time."""
