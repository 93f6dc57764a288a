"""What is noticed of a run and told: weights that do not move, data that a pass changes, state that no checkpoint holds."""
