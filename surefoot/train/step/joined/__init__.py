"""Steps whose passes and update are one: an update inside the backward pass, a compiled step."""
