"""The rate of learning over a run: curves, the table that chooses them, and that table as one curve."""
