"""Records of a run: log, console output, scores, peak memory, profiles and summary."""
