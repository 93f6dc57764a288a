"""Process groups, host copies of state and attributes of objects: what the components run on."""
