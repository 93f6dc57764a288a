"""What lies between a model and the machine: host copies of state today, process groups later."""
