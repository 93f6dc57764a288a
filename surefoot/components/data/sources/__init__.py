"""Sources: samples by number, from arrays, token streams, files, torch datasets and iterables."""
