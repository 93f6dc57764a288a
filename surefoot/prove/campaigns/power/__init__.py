"""Power cuts: the file operations of a real run, and the disks that a cut at any moment may leave."""
