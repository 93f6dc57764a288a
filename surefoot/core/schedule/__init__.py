"""Learning-rate schedules: curves, the [schedule] table, and the curve that it specifies."""
