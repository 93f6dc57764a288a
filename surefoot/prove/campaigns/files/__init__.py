"""Files of a run that are damaged by accident, and such as are made to do harm."""
