"""What a step of a spec takes, and how near that is to what the machine can do: `surefoot bench step`, `surefoot roofline`."""
