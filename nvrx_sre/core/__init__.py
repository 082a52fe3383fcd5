"""Foundation that every other package may import: clock, ids, errors, limits, atomic files. Standard library only."""
