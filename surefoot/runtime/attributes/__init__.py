"""State in plain attributes of modules, which `Module.to` and `state_dict` leave out."""
