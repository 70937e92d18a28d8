"""Every interleaving of the real save: its code on threads of which one runs at a time."""
