"""Time of a step of a spec, and how close it is to the limits of the machine.

For `surefoot bench step` and `surefoot roofline`.
"""
