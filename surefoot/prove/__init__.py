"""Claims put to the test in fresh processes: does a run repeat, and does it go on as if it had never stopped?"""
