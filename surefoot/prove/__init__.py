"""Tests in fresh processes: whether a run repeats bitwise, and resumes bitwise after faults."""
