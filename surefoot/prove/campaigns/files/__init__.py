"""Files of a run that are damaged by accident, and files that are made to do harm."""
