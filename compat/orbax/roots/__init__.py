"""Roots of steps as Orbax has them: their names, what is kept, what lies beside the steps."""
