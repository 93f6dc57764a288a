"""What a run records of itself: what it tells while it goes on, its scores, and what came of it."""
