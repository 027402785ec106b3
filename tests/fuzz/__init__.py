"""Fuzzing: damaged, swapped and lying input is refused in words, or read as it stands."""
