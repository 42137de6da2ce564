"""Many requests at once: arrivals, workloads, systems under load, and what they make of it."""
