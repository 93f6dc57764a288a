"""Process groups, plain attributes of modules, and copies of training state in host memory."""
