"""State that differs between ranks: the task's per-rank entries, and PowerSGD residuals."""
