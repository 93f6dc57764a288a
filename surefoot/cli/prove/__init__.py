"""The verbs that put a claim to the test."""
