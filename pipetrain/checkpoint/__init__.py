"""What is left of a run that dies: saved at window boundaries, proved whole, read into any partition."""
