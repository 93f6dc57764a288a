"""What the verbs of this group print: a table and a verdict each, from what was measured."""
