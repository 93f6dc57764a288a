"""Time of a training step, and its distance to the limits of the machine.

For `surefoot bench step` and `surefoot roofline`.
"""
