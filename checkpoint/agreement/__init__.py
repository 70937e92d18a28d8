"""What processes tell each other about a save or a restore, and how it ends alike for all."""
