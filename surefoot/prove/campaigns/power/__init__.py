"""Power cuts: the file operations of a real run, and the disk states that a cut may leave."""
