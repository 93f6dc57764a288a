"""What another spec would cost, or gain, measured before it is chosen."""
