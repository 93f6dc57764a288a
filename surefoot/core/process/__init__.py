"""What a process reads of itself and of the system: whose code a frame is, which launcher started it, how much memory it may use."""
