"""What each rank holds that the others do not: entries of the task's state, and what it has not yet sent of its gradients."""
