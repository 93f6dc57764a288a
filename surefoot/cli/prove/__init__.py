"""The verbs that test a claim."""
