"""What runs the collectives of a program (explain), and what was lowered (stats)."""
