"""Records of a run: its log, its console output, its scores and its summary."""
