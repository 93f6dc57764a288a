"""State that differs between ranks: entries of the task's `state()`, and PowerSGD residuals."""
