"""What is known of ranks without any of them running: how many lie on which axis, and which one the others wait for."""
