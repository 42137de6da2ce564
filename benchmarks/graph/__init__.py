"""Questions over knowledge graphs: their prompts, answers, work and time."""
