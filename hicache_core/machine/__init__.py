"""What this machine allows: its limits, its control groups, and the budget of a rank."""
